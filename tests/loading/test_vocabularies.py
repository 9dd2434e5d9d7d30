"""A drafter must spell every token as the target does, or its guesses mean something else."""

from __future__ import annotations

import pytest

from minitri import InputError
from minitri.loading.tokenizer import Tokenizer, check_same_vocabulary


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
    with pytest.raises(InputError) as refused:
        check(other, TOKENS)
    message = str(refused.value)
    assert "\n" not in message
    assert (
        f"the drafter tiny-draft has another vocabulary: its token {position} is 'other'" in message
    )
    assert f"the target's is {TOKENS[position]!r}; use a drafter" in message


def test_two_tokens_that_have_changed_places_are_refused():
    """The same set of tokens, and the same number of them."""
    with pytest.raises(InputError, match="its token 3 is 'b', the target's is 'a'"):
        check(["<unk>", "<s>", "</s>", "b", "a", "Ġthe"], TOKENS)
