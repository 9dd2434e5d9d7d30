"""All kinds of tokenizer, streamed text, and drafters, which must spell as the target does."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import minitri
from minitri import Grammar
from minitri.files.checkpoint import load_tokenizer
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder
from minitri.text.matcher import GrammarMatcher, compiled, lexicon_of
from minitri.text.tokenizer import StreamDetokenizer, Tokenizer, check_same_vocabulary
from tests.conftest import SENTENCES, byte_level_tokenizer, refused
from tests.core.rigs import tiny_config
from tests.files.gguf_writer import pieces, write_gguf
from tests.files.test_checkpoint import copy_of

HARD = "Naïve 日本語 🙂🚀 — “quotes”,\n\n  two  spaces\tand a tab"
CONFIG = tiny_config(vocab_size=500, bos_token_id=1)


def load(path: Path) -> Tokenizer:
    return load_tokenizer(GgufFile(path) if path.suffix else Folder(path), CONFIG)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    sp, folder = (tmp_path_factory.mktemp(name) for name in ("sp", "tokenizers"))
    pieces(sp / "tokenizer", model_type="bpe")
    words = byte_level_tokenizer()
    words.save(str(folder / "tokenizer.json"))
    paths = {
        "tokenizer.json": folder,
        "sentencepiece": sp,
        "gguf bpe": write_gguf(folder / "tiny.gguf", CONFIG, words),
        "gguf sentencepiece": write_gguf(folder / "sp.gguf", CONFIG, sp / "tokenizer.model"),
    }
    return {name: load(path) for name, path in paths.items()}


@pytest.fixture(params=["sentencepiece", "tokenizer.json", "gguf bpe", "gguf sentencepiece"])
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


def read(reader: StreamDetokenizer, ids: list[int]) -> str:
    return "".join(reader(token)[0] for token in [*ids, None])


def test_text_round_trips_and_its_streamed_pieces_put_together_are_the_text(tokenizer):
    assert tokenizer.token_bytes(2) == b"</s>"  # which no text shows
    for text in (*SENTENCES, HARD):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ids = tokenizer.encode("Before: " + text)
        start = len(tokenizer.encode("Before:"))
        reader = StreamDetokenizer(tokenizer, ids[:start])
        assert not any("\ufffd" in reader(token)[0] for token in ids[start:])
        for cut in (0, start):
            pieces = read(StreamDetokenizer(tokenizer, ids[:cut]), ids[cut:])
            assert tokenizer.decode(ids[:cut]) + pieces == tokenizer.decode(ids)
    for before in ("", "The ", "The\n"):
        ids = tokenizer.encode(f"{before}harbour")
        assert any(ids[-len(way) :] == way for way in tokenizer.spellings("harbour"))


def test_a_prompt_cut_inside_a_character_does_not_swallow_what_follows(tokenizer):
    ids = tokenizer.encode("x 🦥yes")
    whole = tokenizer.decode(ids)
    for cut in range(2, len(ids)):
        before = tokenizer.decode(ids[:cut])
        text = read(StreamDetokenizer(tokenizer, ids[:cut]), ids[cut:])
        assert text == whole[len(before.rstrip("\ufffd")) :]


@pytest.mark.parametrize("num_broken", [0, 1, 15, 40])
def test_broken_bytes_are_told_at_once_and_break_no_character(tokenizer, num_broken):
    [broken] = (i for i in range(tokenizer.num_tokens) if tokenizer.token_bytes(i) == b"\xff")
    start, *others = tokenizer.encode("a🦥b")[-6:]
    reader = StreamDetokenizer(tokenizer, [start])
    assert [reader(token)[0] for token in [broken] * num_broken] == ["\ufffd"] * num_broken
    assert read(reader, others) == "🦥b"
    reader = StreamDetokenizer(tokenizer, [start, *others[:2]])  # two bytes of four
    assert read(reader, [broken, others[-1], others[0]]) == "\ufffdb\ufffd"


def test_the_gguf_forms_tokenize_like_their_originals(tokenizers):
    bpe, sp = (tokenizers[name] for name in ("gguf bpe", "gguf sentencepiece"))
    for text in (*SENTENCES, HARD):
        assert bpe.encode(text) == byte_level_tokenizer().encode(text).ids
        assert sp.encode(text) == tokenizers["sentencepiece"].encode(text)
    assert sp.encode_marked("</s>a<s>") == [2, *sp.encode("a")[1:], 1]


@pytest.mark.parametrize(
    ("pre", "words", "composed"),
    [("qwen2", "in Ġ 1 2 3 4 !a", "\u00e9"), ("llama-bpe", "in Ġ 123 4 !a", "e\u0301")],
)
def test_gguf_words_are_cut_as_by_the_tokenizer_of_the_family(tmp_path, pre, words, composed):
    """One of them begins texts with BOS where no key says whether."""
    silent = {"tokenizer.ggml.add_bos_token": None}
    path = write_gguf(tmp_path / "x.gguf", CONFIG, byte_level_tokenizer(), changes=silent, pre=pre)
    tokenizer = load(path)
    cuts = GgufFile(path).tokenizer().pre_tokenizer.pre_tokenize_str("in 1234!a")
    assert [word for word, _ in cuts] == words.split()
    assert tokenizer.decode(ids := tokenizer.encode("e\u0301")) == composed
    assert (ids[0] == CONFIG.bos_token_id) == (pre == "llama-bpe")


def test_bos_follows_the_config(tokenizers):
    assert tokenizers["sentencepiece"].encode("word")[0] == 1
    assert tokenizers["sentencepiece"].decode([1, 450, 499]) == ""  # of a padded vocabulary
    assert tokenizers["tokenizer.json"].encode("word")[0] != 1


TOKENS: list[str | None] = ["<unk>", "<s>", "</s>", "a", "b", "Ġthe"]


def check(*vocabularies: list[str | None]) -> None:
    spellings = (SimpleNamespace(num_tokens=len(v), token=v.__getitem__) for v in vocabularies)
    check_same_vocabulary(*spellings, "tiny-draft")


@pytest.mark.parametrize("more", [[], ["<pad>", None]])
def test_vocabularies_agree_where_both_have_tokens(more):
    for draft, target in ((TOKENS + more, TOKENS), (TOKENS, TOKENS + more), (TOKENS[:4], TOKENS)):
        check(draft, target)
    for position in range(len(TOKENS)):
        other = [*TOKENS[:position], "other", *TOKENS[position + 1 :], *more]
        with refused("tiny-draft", f"token {position} is 'other'"):
            check(other, TOKENS)


def test_a_drafter_of_another_family_is_refused_by_name_before_weights_are_read(folder, tmp_path):
    other = copy_of(folder, tmp_path / "other-words", "tokenizer.json", "*.safetensors")
    pieces(other / "tokenizer", model_type="bpe", vocab_size=320)  # with the same first tokens
    with refused("the drafter other-words has another vocabulary"):
        minitri.load(folder, draft=other)


def test_a_grammar_sees_the_bytes_of_every_token(tokenizer):
    """Parts of characters, spaces at borders, bytes; control tokens are none of a text."""
    config = replace(CONFIG, eos_token_ids=(2,))
    for text in (*SENTENCES, HARD, "\x01\x7f ~ 日 本"):
        ids = [token for token in tokenizer.encode(text) if token != 1]
        lexicon = lexicon_of(tokenizer, config)
        spelled = lexicon.decode_bytes(ids).decode()
        assert spelled.removeprefix(" ") == text or spelled == text
        start = compiled(Grammar("choice", json.dumps([spelled])), tokenizer, config)
        matcher = GrammarMatcher(start, config)
        for n, token in enumerate([*ids, 2]):
            is_bad_V = matcher.forbidden(ids[:n])
            assert not is_bad_V[token]
            assert is_bad_V[:2].all()
            assert is_bad_V[2] == (n < len(ids))
            assert is_bad_V[tokenizer.num_tokens :].all()
