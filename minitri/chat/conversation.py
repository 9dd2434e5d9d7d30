"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

It opens with a system message and documents; then come turns of a question and an answer. Where the
context is full the oldest turns go, never the opening. What the chat template puts between two
answers is rendered with marks in the places of the answers and of the question, and cut there. A
model without one gets plain questions and answers.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from minitri.errors import InputError, check_unicode, explain
from minitri.loading.tokenizer import Tokenizer

QUESTION, ANSWER = "\nQuestion: ", "\nAnswer:"
"""How a conversation is written for a model without a template."""
MARK, EARLIER = "<|minitri-question|>", "<|minitri-answer|>"


@dataclass(frozen=True)
class Opening:
    """All that stands before the first question."""

    system: str | None
    """How the model is to behave."""
    documents: Sequence[tuple[str, str]]
    """Name and text of each."""
    sizes: Sequence[int]
    """Tokens of each."""
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Of the documents."""
        return sum(self.sizes)

    @property
    def num_first(self) -> int:
        """Tokens before the documents."""
        return len(self.token_ids) - self.num_tokens


@dataclass(frozen=True)
class Turn:
    """A question and its answer, or the beginning of one."""

    question: str
    token_ids: Sequence[int] = ()
    """Of the answer."""
    text: str = ""
    end: str = ""
    """How the end token of the answer is spelled."""
    is_cut: bool = False
    """Whether the answer was stopped, or had no more room."""


class Conversation:
    """Documents, questions and answers, one after the other."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        documents: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`system` tells the model how to behave; documents are names and texts. Raises
        `InputError` if its template refuses."""
        self._tokenizer = tokenizer
        self.stops = () if tokenizer.chat_template is not None else (QUESTION,)
        """Where an answer ends, if no end token says so."""
        self.turns: list[Turn] = []
        self.open(self.opening_of(system, documents))

    def opening_of(self, system: str | None, documents: Sequence[tuple[str, str]]) -> Opening:
        """An opening with this system message and these documents. Raises `InputError`."""
        tokenizer = self._tokenizer
        encode = tokenizer.encode  # with BOS
        before = "" if system is None else f"{system}\n\n"
        if tokenizer.chat_template is not None:
            encode = tokenizer.encode_marked
            before, _ = self._around_mark(system, ("user", MARK))
        texts = [f"{text.strip()}\n\n" for _, text in documents]
        pieces = [encode(before + "".join(texts[:1])), *map(tokenizer.encode_marked, texts[1:])]
        sizes = [*map(len, pieces)][: len(texts)]
        if sizes:
            sizes[0] -= len(encode(before))
        return Opening(system, documents, sizes, [*itertools.chain(*pieces)])

    def open(self, opening: Opening, num_kept: int | None = None) -> None:
        """Replaces the opening; of its documents the first tokens are kept, by default all."""
        self.opening = opening
        self.num_kept = opening.num_tokens
        self.beginning = opening.token_ids
        """What is to be read before the first question."""
        if num_kept is not None and num_kept < self.num_kept:
            self.num_kept = max(0, num_kept)
            self.beginning = opening.token_ids[: opening.num_first + self.num_kept]
            self.beginning += self._tokenizer.encode_marked("\n\n")

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of the opening and of these turns, up to where the last answer goes on."""
        found = [*self.beginning]
        for previous, turn in zip([None, *turns], turns, strict=False):
            found += self._tokenizer.encode_marked(self._asked(previous, turn.question))
            found += turn.token_ids
        return found

    def slide(self, turns: Sequence[Turn], most: int) -> Sequence[Turn]:
        """The latest turns that fit in `most` tokens, the last in any case. Where one has to go, a
        quarter of their room is made free, so that not every question begins by reading others."""
        if len(self.ids(turns)) <= most:
            return turns
        most -= (most - len(self.beginning)) // 4
        while len(turns) > 1 and len(self.ids(turns)) > most:
            turns = turns[1:]
        return turns

    def as_note(self) -> str:
        """All of it, for `restore`."""
        turns = [dataclasses.astuple(turn) for turn in self.turns]
        opening = dataclasses.astuple(self.opening)
        return json.dumps({"opening": opening, "num_kept": self.num_kept, "turns": turns})

    def restore(self, note: str) -> None:
        """Goes on where another conversation was. Raises `InputError`."""
        with explain("the snapshot holds no conversation", "load one of /save"):
            found = json.loads(note)
            turns = [Turn(*turn) for turn in found["turns"]]
            self.open(Opening(*found["opening"]), found["num_kept"])
        self.turns = turns

    def _asked(self, previous: Turn | None, question: str) -> str:
        """What stands between two answers, or between the opening and the first."""
        check_unicode(question, "the question")
        if self._tokenizer.chat_template is None:
            return QUESTION + question + ANSWER
        system = self.opening.system
        if previous is None:
            return question + self._around_mark(system, ("user", MARK))[1]
        turns = (("user", "x"), ("assistant", EARLIER), ("user", MARK))
        before, after = self._around_mark(system, *turns)
        before = before.rpartition(EARLIER)[2].removeprefix(previous.end)
        return before + question + after

    def _around_mark(self, system: str | None, *turns: tuple[str, str]) -> tuple[str, str]:
        """What the template writes before and after the mark."""
        template = self._tokenizer.chat_template
        assert template is not None
        messages = [] if system is None else [("system", system)]
        messages += turns
        text = template.render([{"role": who, "content": what} for who, what in messages])
        before, mark, after = text.rpartition(MARK)
        if not mark:
            raise InputError("the model's chat template leaves questions out; use another model")
        return before, after
