"""A drafter must spell every token as the target does, or its guesses mean something else."""

import json

import pytest
from tokenizers import models

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig, load
from minitri.loading.tokenizer import Tokenizer, check_same_vocabulary
from tests.conftest import byte_level_tokenizer, write_hf_folder
from tests.loading.test_tokenizer import train_sentencepiece


class Spelling:
    """A tokenizer backend that only knows how tokens are spelled."""

    def __init__(self, tokens: list[str | None]) -> None:
        self.tokens, self.num_tokens = tokens, len(tokens)

    def token(self, number: int) -> str | None:
        return self.tokens[number]


TOKENS: list[str | None] = ["<unk>", "<s>", "</s>", "a", "b", "Ġthe"]


def check(draft: list[str | None], target: list[str | None]) -> None:
    ours, theirs = Tokenizer(Spelling(draft), None), Tokenizer(Spelling(target), None)
    check_same_vocabulary(ours, theirs, "tiny-draft")


@pytest.mark.parametrize(
    ("draft", "target"),
    [
        (TOKENS, TOKENS),
        ([*TOKENS, "<pad>", "<extra>"], TOKENS),
        (TOKENS, [*TOKENS, "<pad>"]),
        (TOKENS[:4], TOKENS),
        ([*TOKENS, None, None], [*TOKENS, None]),
    ],
    ids=["same", "drafter longer", "target longer", "drafter much shorter", "unused ids"],
)
def test_vocabularies_that_agree_where_both_have_tokens_pass(draft, target):
    check(draft, target)


@pytest.mark.parametrize("position", range(len(TOKENS)))
@pytest.mark.parametrize("padding", [0, 2])
def test_one_token_that_differs_is_refused_in_one_line(position, padding):
    other = [*TOKENS, *["<pad>"] * padding]
    other[position] = "other"
    with pytest.raises(InputError, match=f"tiny-draft .* token {position} is 'other'") as refused:
        check(other, TOKENS)
    assert "\n" not in str(refused.value)
    assert repr(TOKENS[position]) in str(refused.value)


def two_tokens_changed_places(folder):
    edited = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = edited["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(edited), encoding="utf-8")


def other_words(folder):
    """Letters in another order, and no merges."""
    pipeline = byte_level_tokenizer()
    names = ["<unk>", "<s>", "</s>", *sorted(pipeline.get_vocab(), reverse=True)]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    pipeline.model = models.BPE(vocab=vocab, merges=[])
    pipeline.save(str(folder / "tokenizer.json"))


def another_library(folder):
    """With the same first tokens."""
    (folder / "tokenizer.json").unlink()
    train_sentencepiece(folder, vocab_size=320)


@pytest.mark.parametrize("change", [two_tokens_changed_places, other_words, another_library])
def test_a_drafter_of_another_family_is_refused_by_name_before_weights_are_read(
    change, folder, tmp_path, monkeypatch
):
    other = write_hf_folder(tmp_path / "other-words")
    change(other)
    monkeypatch.setattr("minitri.loading.open_models.load_model", None)
    with pytest.raises(InputError, match="the drafter other-words has another vocabulary") as it:
        load(folder, draft=other)
    assert "\n" not in str(it.value)


@pytest.mark.parametrize("vocab_size", [312, 400])
@pytest.mark.parametrize("num_tokens", [-20, 0, 1])
def test_a_drafter_with_more_or_fewer_tokens_at_the_end_is_taken(
    folder, tmp_path, num_tokens, vocab_size
):
    """In its tokenizer, in its model, or in both."""
    other = write_hf_folder(tmp_path / "other", vocab_size=vocab_size)
    content = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    end = len(vocab) + num_tokens
    vocab |= {f"<{n}>": n for n in range(len(vocab), end)}
    content["model"]["vocab"] = {name: number for name, number in vocab.items() if number < end}
    content["model"]["merges"] = merges[: len(merges) + min(num_tokens, 0)]
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    engine = load(folder, draft=other, dtype="float32")
    done = engine.complete(
        [5, 6, 7],
        sampling=SamplingParams(1.0),
        speculation=SpeculationConfig("naive"),
        generation=GenerationConfig(30, ignore_eos=True),
    )
    assert max(done.token_ids) < engine.config.vocab_size
    assert done.stats.levels[0].num_tested_tokens > 0
