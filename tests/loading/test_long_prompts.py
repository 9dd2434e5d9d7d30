"""The first tokens of a long text are those of the whole text, and cost no more than they must.

Each kind of tokenizer is compared with its library's tokens of the whole text: for long runs of
spaces, words without end, control tokens that span every cut, and scripts without spaces.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from minitri.loading.gguf.file import GgufFile
from minitri.loading.gguf.tokenizer import WORDS as PATTERNS
from minitri.loading.tokenizer import (
    SentencePieceBackend,
    Tokenizer,
    TokenizersBackend,
    load_tokenizer,
)
from tests.conftest import SENTENCES, byte_level_tokenizer, tiny_config
from tests.loading.gguf_writer import write_gguf_with_sentencepiece

WORDS = [
    *" ".join(SENTENCES).split(), "日本語テキスト。", "größer，", "привет", "🙂", "  ", "      ",
    "\n", "\n\n ", "\t", "a", "I", "'s", "</s>", "<s>", "1814", "...", "▁", "x▁y", "\u0301", "Ġ",
]  # fmt: skip


def texts() -> dict[str, str]:
    choose = random.Random(0)
    mixed = "".join(choose.choice(WORDS) + choose.choice(["", " ", "  "]) for _ in range(3000))
    return {
        "prose": " ".join(SENTENCES * 40),
        "mixed": mixed,
        "spaces": "She had" + " " * 6000 + "been forced" + " " * 3000,
        "one word": "abcdefghij" * 1000,
        "one letter": "a" * 10_000,
        "letters and spaces": "a " * 5000,
        "no spaces": "日本語テキスト。größer，привет、" * 500,
        "control tokens": "say </s>" * 1000 + "<s>word " * 500,
        "bytes": "🙂🚀" * 2000,
    }


TEXTS = texts()


def llama2_pipeline() -> tokenizers.Tokenizer:
    """A tokenizer.json in the way of Llama 2: no word is split, spaces are part of the tokens."""
    pipeline = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    pipeline.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    words = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    words.train_from_iterator(SENTENCES, trainer)
    content, trained = json.loads(pipeline.to_str()), json.loads(words.to_str())
    content["model"] |= {key: trained["model"][key] for key in ("vocab", "merges")}
    pipeline = tokenizers.Tokenizer.from_str(json.dumps(content))
    pipeline.add_special_tokens(["<s>", "</s>"])
    return pipeline


def trained(folder: Path, **options) -> Path:
    text = folder / "text.txt"
    text.write_text("\n".join([*SENTENCES * 5, "a  b" + " " * 20 + "c"]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), minloglevel=2,
        **{"vocab_size": 400, "model_type": "bpe", "byte_fallback": True,
           "normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options},
    )  # fmt: skip
    return folder / "tokenizer.model"


SENTENCEPIECE = {
    "sentencepiece": {},
    "sentencepiece across words": {"split_by_whitespace": False, "vocab_size": 500},
    "sentencepiece nfkc": {"normalization_rule_name": "nmt_nfkc"},
    "sentencepiece squeezed": {"remove_extra_whitespaces": True},
    "sentencepiece suffix": {"treat_whitespace_as_suffix": True},
    "sentencepiece unigram": {"model_type": "unigram", "vocab_size": 320},
    "sentencepiece without bytes": {"byte_fallback": False, "vocab_size": 150},
}
SPLIT_LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(tokenizers.Regex(PATTERNS[0]["Regex"]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
SMOLLM = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
)
UNSPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
FOREIGN = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(tokenizers.Regex(r"\w+(?= \w+ z)|\S+|\s+"), "isolated"), UNSPLIT]
)
PIPELINES = {"byte level": None, "llama 3": SPLIT_LLAMA3, "smollm": SMOLLM}
PIPELINES |= {"no words": UNSPLIT, "a foreign pattern": FOREIGN}
CUT = {
    "sentencepiece", "sentencepiece squeezed", "sentencepiece nfkc",
    "sentencepiece unigram", "gguf sentencepiece", "llama 2", "byte level", "llama 3", "smollm",
}  # fmt: skip
"""Tokenizers that need not read the whole of a plain text."""


@pytest.fixture(
    scope="module", params=[*SENTENCEPIECE, "gguf sentencepiece", "llama 2", "spanning", *PIPELINES]
)
def named(request, tmp_path_factory) -> tuple[str, Tokenizer]:
    name, folder = request.param, tmp_path_factory.mktemp("tokenizer")
    if name in SENTENCEPIECE:
        model = trained(folder, **SENTENCEPIECE[name]).read_bytes()
        return name, Tokenizer(SentencePieceBackend(model), 1)
    if name == "gguf sentencepiece":
        config = tiny_config(vocab_size=500, bos_token_id=1)
        path = write_gguf_with_sentencepiece(folder / "x.gguf", config, trained(folder))
        return name, load_tokenizer(GgufFile(path), config)
    pipeline = llama2_pipeline() if name == "llama 2" else byte_level_tokenizer()
    if name == "spanning":
        pipeline.add_special_tokens(["had been", "say </s>say"])
    elif PIPELINES.get(name) is not None:
        pipeline.pre_tokenizer = PIPELINES[name]
    return name, Tokenizer(TokenizersBackend(pipeline), 1)


@pytest.mark.parametrize("text", TEXTS)
def test_the_first_tokens_are_those_of_the_whole_text(named, text):
    _, tokenizer = named
    whole = tokenizer.encode(TEXTS[text])
    for number in [*range(1, 60), 100, 333, 1000, 2000, len(whole) - 1, len(whole), len(whole) + 1]:
        assert tokenizer.encode(TEXTS[text], number) == whole[:number], number


def test_of_a_long_text_only_the_beginning_is_read(named, monkeypatch):
    name, tokenizer = named
    read = []
    backend = type(tokenizer._backend)
    encode = backend.encode
    monkeypatch.setattr(
        backend, "encode", lambda self, text: read.append(len(text)) or encode(self, text)
    )
    text = "She had been forced into prudence in her youth. " * 4_000
    assert len(tokenizer.encode(text, 100)) == 100
    if name in CUT:
        assert max(read) < 10_000
    else:
        assert max(read) == len(text)


def test_a_word_without_end_is_read_once_and_as_a_whole(named, monkeypatch):
    """There is no place where it could be cut: what its first tokens are may depend on its end."""
    _, tokenizer = named
    read = []
    encode = type(tokenizer._backend).encode
    monkeypatch.setattr(
        type(tokenizer._backend),
        "encode",
        lambda self, text: read.append(len(text)) or encode(self, text),
    )
    tokenizer.encode("x" * 20_000, 10)
    assert read == [20_000]
