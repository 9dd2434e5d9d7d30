"""All three kinds of tokenizer, and streaming that never breaks a character or loses a space."""

from pathlib import Path

import pytest
import sentencepiece

from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_folder import Folder
from minitri.loading.text_stream import IncrementalDecoder
from minitri.loading.tokenizer import Tokenizer
from minitri.loading.tokenizer_files import load_tokenizer
from tests.conftest import SENTENCES, byte_level_tokenizer, edit_json, tiny_config
from tests.loading.gguf_writer import write_gguf, write_gguf_with_sentencepiece

HARD = "Naïve 日本語 🙂🚀 — “quotes”,\n\n  two  spaces\tand a tab"


def train_sentencepiece(folder: Path, vocab_size: int) -> Path:
    """A sentencepiece BPE with Llama-2's options."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory) -> Path:
    return train_sentencepiece(tmp_path_factory.mktemp("sp"), vocab_size=400)


CONFIG = tiny_config(vocab_size=500, bos_token_id=1)


def load(path: Path) -> Tokenizer:
    return load_tokenizer(GgufFile(path) if path.suffix else Folder(path), CONFIG)


@pytest.fixture
def tokenizers(sentencepiece_folder, tmp_path) -> dict[str, Tokenizer]:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    bpe = write_gguf(tmp_path / "tiny.gguf", CONFIG, byte_level_tokenizer())
    model = sentencepiece_folder / "tokenizer.model"
    sp = write_gguf_with_sentencepiece(tmp_path / "sp.gguf", CONFIG, model)
    paths = {"tokenizer.json": tmp_path, "sentencepiece": sentencepiece_folder}
    paths |= {"gguf bpe": bpe, "gguf sentencepiece": sp}
    return {name: load(path) for name, path in paths.items()}


KINDS = ["sentencepiece", "tokenizer.json", "gguf bpe", "gguf sentencepiece"]


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


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


def test_the_gguf_forms_tokenize_like_their_originals(tokenizers):
    bpe, sp = (tokenizers[name] for name in ("gguf bpe", "gguf sentencepiece"))
    for text in (*SENTENCES, HARD):
        assert bpe.encode(text) == byte_level_tokenizer().encode(text).ids
        assert sp.encode(text) == tokenizers["sentencepiece"].encode(text)
    assert sp.encode_marked("</s>a<s>") == [2, *sp.encode("a")[1:], 1]


def test_bos_follows_the_config_and_is_not_doubled(sentencepiece_folder, tmp_path):
    assert load(sentencepiece_folder).encode("word")[0] == 1
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("word")[0] != 1
    (tmp_path / "tokenizer_config.json").write_text("{}")
    edit_json(tmp_path / "tokenizer_config.json", add_bos_token=True)
    assert load(tmp_path).encode("word")[0] == 1
    assert load(tmp_path).encode("<s>word")[:2].count(1) == 1
