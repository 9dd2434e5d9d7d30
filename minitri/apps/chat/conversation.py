"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

It begins with a system message and documents; turns of a question and an answer follow. Where the
context is full the oldest turns go, never the beginning. The text that the chat template puts
between two answers is rendered with marks in the places of the answers and of the question, and cut
there. A model without a template gets plain questions and answers.
"""

import argparse
import bisect
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from minitri.core.config import ModelConfig
from minitri.core.errors import MAX_COUNT, InputError, explain
from minitri.core.log import log

if TYPE_CHECKING:
    from minitri.text.tokenizer import Tokenizer

QUESTION, ANSWER = "\nQuestion: ", "\nAnswer:"
"""How a conversation is written for a model without a template."""
TALK_TOKENS = 4096
"""Room for questions and answers after the documents, or a quarter of a small context."""
MARK, EARLIER = "<|minitri-question|>", "<|minitri-answer|>"


class Document(NamedTuple):
    """A text to ask about, or its beginning."""

    name: str
    token_ids: Sequence[int]
    size: int
    """Tokens of the whole text."""


class Turn(NamedTuple):
    """A question and its answer, or the beginning of one."""

    question: str
    token_ids: Sequence[int] = ()
    """The answer's."""
    is_cut: bool = False
    """Whether the answer was stopped, or had no more room."""


@dataclass(frozen=True)
class Conversation:
    """A system message, documents, and turns of questions and answers."""

    tokenizer: "Tokenizer"
    system: str | None = None
    """How the model is to behave."""
    documents: Sequence[Document] = ()
    turns: Sequence[Turn] = ()
    most: int = MAX_COUNT
    """Tokens of the beginning to keep: those that were read, if Ctrl-C stopped that."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings for a model without a chat template; empty if it has one."""
        return () if self.tokenizer.chat_template is not None else (QUESTION,)

    @functools.cached_property
    def start(self) -> list[int]:
        """Token ids before the documents. Raises `InputError` if the chat template refuses."""
        encode = self.tokenizer.encode if self.stops else self.tokenizer.encode_marked  # BOS or not
        return encode(self._around_question(None)[0])

    @functools.cached_property
    def beginning(self) -> list[int]:
        """Token ids before the first question."""
        ids = [*self.start]
        gap = self.tokenizer.encode_marked("\n\n")
        for document in self.documents:
            ids += [*document.token_ids, *gap]
        return ids if len(ids) <= self.most else [*ids[: self.most], *gap]

    def with_documents(
        self, texts: Mapping[str, str], config: ModelConfig, args: argparse.Namespace
    ) -> "Conversation":
        """A copy with more documents, by name. --fit and --max-prompt-tokens cut the longest of all
        documents to one length. Raises `InputError` if the context has no room for them."""
        documents = [*self.documents]
        for name, text in texts.items():
            ids = self.tokenizer.encode_marked(text.strip())
            documents.append(Document(name, ids, len(ids)))
        context = config.context_length
        start = len(self.start)
        room = context - start - min(TALK_TOKENS, context // 4)
        sizes = [document.size for document in documents]
        kept = min(sum(sizes), args.max_prompt_tokens or MAX_COUNT)
        if args.fit:
            kept = max(0, min(kept, room))
        if kept > room:
            factor = -(-(context - room + kept) // context)
            raise InputError(
                f"the text has {start + kept} tokens but {config.name} has room for {start + room} "
                "and for questions and answers; --fit keeps what fits, --max-prompt-tokens N keeps "
                f"N tokens, --rope-scaling yarn:{factor} extends the context"
            )
        lengths = range(1, max(sizes, default=0) + 1)
        most = bisect.bisect(lengths, kept, key=lambda n: sum(min(n, size) for size in sizes))
        for name, _, size in documents:
            if most < size:
                log.info("%s: its first %d of %d tokens", name, most, size)
        cut = [document._replace(token_ids=document.token_ids[:most]) for document in documents]
        return replace(self, documents=cut)

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of the beginning and of these turns, up to where the last answer continues."""
        ids = [*self.beginning]
        for previous, turn in zip([None, *turns], turns, strict=False):
            before, after = self._around_question(previous)
            if previous is None:
                before = "".join(self.stops)
            ids += self.tokenizer.encode_marked(before + turn.question + after)
            ids += turn.token_ids
        return ids

    def slide(self, turns: Sequence[Turn], most: int) -> Sequence[Turn]:
        """The latest turns that fit in `most` tokens, at least the last one. A quarter of them goes
        at a time, so that few questions make the model read all turns again."""
        while len(turns) > 1 and len(self.ids(turns)) > most:
            turns = turns[(len(turns) + 3) // 4 :]
        return turns

    def as_note(self) -> str:
        """The conversation as JSON, for `restored`."""
        return json.dumps([self.system, self.documents, self.turns, self.most])

    def restored(self, note: str) -> "Conversation":
        """The conversation in a note of `as_note`. Raises `InputError`."""
        with explain("the snapshot holds no conversation", "load one of /save"):
            system, documents, turns, most = json.loads(note)
            parts = [Document(*fields) for fields in documents], [Turn(*fields) for fields in turns]
            return Conversation(self.tokenizer, system, *parts, most)

    def _around_question(self, previous: Turn | None) -> tuple[str, str]:
        """The text before a question, from the start or the end of the previous answer on, and the
        text after it."""
        template = self.tokenizer.chat_template
        if template is None:
            start = f"{self.system}\n\n" if self.system else ""
            return QUESTION if previous else start, ANSWER
        messages = [] if self.system is None else [("system", self.system)]
        messages += [("user", "x"), ("assistant", EARLIER)] if previous else []
        messages.append(("user", MARK))
        text = template.render([{"role": role, "content": text} for role, text in messages])
        before, mark, after = text.rpartition(MARK)
        if not mark:
            raise InputError("the model's chat template leaves questions out; use another model")
        if previous is not None:
            before = before.rpartition(EARLIER)[2]
            if not previous.is_cut:
                before = before.removeprefix(self.tokenizer.token(previous.token_ids[-1]) or "")
        return before, after
