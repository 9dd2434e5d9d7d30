"""All three kinds of tokenizer, and streaming that never breaks a character or loses a space."""

from pathlib import Path

import pytest
import sentencepiece

from minitri.errors import InputError
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_folder import Folder
from minitri.loading.text_stream import IncrementalDecoder
from minitri.loading.tokenizer import Tokenizer
from minitri.loading.tokenizer_files import load_tokenizer
from tests.conftest import SENTENCES, byte_level_tokenizer, edit_json, tiny_config
from tests.loading.gguf_writer import write_gguf, write_gguf_with_sentencepiece

HARD = "Naïve 日本語 🙂🚀 — “quotes”,\n\n  two  spaces\tand a tab"


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory) -> Path:
    """A sentencepiece BPE with Llama-2's options, trained here."""
    folder = tmp_path_factory.mktemp("sp")
    text = folder / "text.txt"
    text.write_text("\n".join(SENTENCES * 5), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder


def load(folder: Path, **changes) -> Tokenizer:
    return load_tokenizer(Folder(folder), tiny_config(vocab_size=500, bos_token_id=1, **changes))


@pytest.fixture(params=["sentencepiece", "tokenizer.json", "gguf bpe", "gguf sentencepiece"])
def tokenizer(request, sentencepiece_folder, tmp_path) -> Tokenizer:
    config = tiny_config(vocab_size=500, bos_token_id=1)
    if request.param == "sentencepiece":
        return load(sentencepiece_folder)
    if request.param == "tokenizer.json":
        byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
        return load(tmp_path)
    if request.param == "gguf bpe":
        return load_tokenizer(
            GgufFile(write_gguf(tmp_path / "tiny.gguf", config, byte_level_tokenizer())), config
        )
    model = sentencepiece_folder / "tokenizer.model"
    return load_tokenizer(
        GgufFile(write_gguf_with_sentencepiece(tmp_path / "sp.gguf", config, model)), config
    )


@pytest.mark.parametrize("text", [*SENTENCES, HARD])
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*SENTENCES, HARD])
def test_streamed_pieces_put_together_are_the_text(tokenizer, text):
    ids = tokenizer.encode("Before: " + text)
    start = len(tokenizer.encode("Before:"))
    decoder = IncrementalDecoder(tokenizer, ids[:start])
    pieces = [decoder.push(token) for token in ids[start:]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert (
        "".join(pieces) + decoder.flush()
        == tokenizer.decode(ids)[len(tokenizer.decode(ids[:start])) :]
    )


def test_half_a_character_waits_and_is_not_lost_at_the_end(tokenizer):
    ids = tokenizer.encode("x 🦥")
    assert len(ids) > 4  # the emoji is several byte tokens
    decoder = IncrementalDecoder(tokenizer, ids[:2])
    assert "\ufffd" not in "".join(decoder.push(token) for token in ids[2:-1])
    assert "\ufffd" in decoder.flush()


def test_a_prompt_cut_inside_a_character_does_not_swallow_what_follows(tokenizer):
    ids = tokenizer.encode("x 🦥yes")
    whole = tokenizer.decode(ids)
    for cut in range(2, len(ids)):
        before = tokenizer.decode(ids[:cut])
        decoder = IncrementalDecoder(tokenizer, ids[:cut])
        text = "".join(decoder.push(token) for token in ids[cut:]) + decoder.flush()
        assert text == whole[len(before.rstrip("\ufffd")) :]


def test_ids_of_a_padded_vocabulary_have_no_text(sentencepiece_folder):
    assert load(sentencepiece_folder).decode([1, 450, 499]) == ""


def test_the_gguf_forms_tokenize_like_their_originals(sentencepiece_folder, tmp_path):
    config = tiny_config(vocab_size=500, bos_token_id=1)
    bpe = GgufFile(write_gguf(tmp_path / "bpe.gguf", config, byte_level_tokenizer()))
    sp = GgufFile(
        write_gguf_with_sentencepiece(
            tmp_path / "sp.gguf", config, sentencepiece_folder / "tokenizer.model"
        )
    )
    for text in (*SENTENCES, HARD):
        assert load_tokenizer(bpe, config).encode(text) == byte_level_tokenizer().encode(text).ids
        assert load_tokenizer(sp, config).encode(text) == load(sentencepiece_folder).encode(text)


def test_bos_follows_the_config_and_is_not_doubled(sentencepiece_folder, tmp_path):
    assert load(sentencepiece_folder).encode("word")[0] == 1
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("word")[0] != 1
    (tmp_path / "tokenizer_config.json").write_text("{}")
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=True)
    assert load(tmp_path).encode("word")[0] == 1
    assert load(tmp_path).encode("<s>word")[:2].count(1) == 1


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(sentencepiece_folder):
    with pytest.raises(InputError, match="has 400 tokens but the model's vocabulary has 399"):
        load_tokenizer(Folder(sentencepiece_folder), tiny_config(vocab_size=399, bos_token_id=1))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_damaged_tokenizer_is_one_clear_line(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x00 not a tokenizer")
    with pytest.raises(InputError, match="damaged"):
        load(tmp_path)


def test_a_missing_tokenizer_is_one_clear_line(tmp_path):
    with pytest.raises(
        InputError, match="has no tokenizer; expected tokenizer.json or tokenizer.model"
    ):
        load(tmp_path)
