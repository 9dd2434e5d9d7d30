"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

A system message and documents come first, then turns of a question and an answer. Where the context
is full the oldest turns go, never the documents. The chat template is rendered once, with marks in
the places of questions and answers, and cut there. A model without one gets plain questions."""

import bisect
import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from minitri.core.config import ModelConfig
from minitri.core.errors import MAX_COUNT, InputError, explain
from minitri.text.tokenizer import Tokenizer

QUESTION = "\nQuestion: "  # without a chat template
ANSWER = "\nAnswer:"
TALK_TOKENS = 4096  # of room for questions and answers, at most a quarter of the context
MARK = "<|minitri|>"  # in place of a question or an answer when the template is rendered


class Document(NamedTuple):
    """A document, or its beginning, as token ids, to ask questions about."""

    name: str
    token_ids: Sequence[int]
    size: int  # of the whole text, in tokens


class Turn(NamedTuple):
    """A question, and its answer, or the beginning of one, as token ids."""

    question: str
    token_ids: Sequence[int] = ()  # of the answer, without an end-of-sequence token
    is_cut: bool = False  # the answer was stopped, or had no more room


@dataclass(frozen=True)
class Conversation:
    """A system message, documents, and turns of questions and answers."""

    tokenizer: Tokenizer
    system: str | None = None
    documents: Sequence[Document] = ()
    turns: Sequence[Turn] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer of a model without a chat template; empty if it has one."""
        return () if self.tokenizer.chat_template else (QUESTION,)

    @cached_property
    def _frame(self) -> tuple[str, str, str]:
        """Texts before the first question, after answers, after questions. Raises `InputError`."""
        if self.stops:
            return f"{self.system}\n\n" if self.system else "", QUESTION, ANSWER
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        question, answer = ({"role": role, "content": MARK} for role in ("user", "assistant"))
        render = self.tokenizer.render_chat
        start, *_ = render([*system, question]).split(MARK)
        _, *parts = render([*system, question, answer, question]).split(MARK)
        if len(parts) != 3:
            raise InputError("the model's chat template leaves questions out; use another model")
        return start, parts[1], parts[2]

    @cached_property
    def beginning(self) -> list[int]:
        """Token ids before the first question: system message and documents."""
        encode = self.tokenizer.encode if self.stops else self.tokenizer.encode_marked  # BOS or not
        ids = encode(self._frame[0])
        for document in self.documents:
            ids += [*document.token_ids, *self.tokenizer.encode_marked("\n\n")]
        return ids

    def with_documents(
        self, texts: Mapping[str, str], config: ModelConfig, args: Namespace
    ) -> "Conversation":
        """A copy with documents added, or replaced, by names in `texts`. Flags (--fit and
        --max-prompt-tokens) cut long ones to equal length. Raises `InputError` if too long."""
        named = {document.name: document for document in self.documents}
        for name, text in texts.items():
            ids = self.tokenizer.encode_marked(text.strip())
            named[name] = Document(name, ids, len(ids))
        documents = named.values()
        context = config.context_length
        start = len(replace(self, documents=()).beginning)
        room = context - start - min(TALK_TOKENS, context // 4)
        sizes = [len(document.token_ids) for document in documents]
        kept = min(sum(sizes), args.max_prompt_tokens or MAX_COUNT)
        if args.fit:
            kept = max(0, min(kept, room))
        if kept > room:
            factor = -(-(start + TALK_TOKENS + kept) // (config.rope.original_context or context))
            raise InputError(
                f"the text has {start + kept} tokens but {config.name} has room for {start + room} "
                "and for questions and answers; /fit or --fit keeps what fits, "
                "--max-prompt-tokens N keeps N tokens, "
                f"a start with --rope-scaling yarn:{factor} extends the context"
            )
        lengths = range(1, sum(sizes) + 1)
        most = bisect.bisect(lengths, kept, key=lambda n: sum(min(n, size) for size in sizes))
        cut = [it._replace(token_ids=it.token_ids[:most]) for it in documents]
        return replace(self, documents=cut)

    @property
    def sizes(self) -> str:
        """A line for each document: how many of its tokens are left after cuts."""
        return "\n".join(f"{name}: {len(ids)} of {n} tokens" for name, ids, n in self.documents)

    def cut(self, num_tokens: int) -> "Conversation":
        """A copy with documents cut to what the first `num_tokens` ids hold; all turns stay."""
        num_tokens -= len(replace(self, documents=()).beginning)
        documents = []
        for name, ids, size in self.documents:
            documents.append(Document(name, ids[: max(0, num_tokens)], size))
            num_tokens -= len(ids)
        return replace(self, documents=documents)

    def mapped(self, change: Callable[[Any], Any]) -> "Conversation":
        """A copy that has `change(ids)` in place of token ids, in all documents and turns."""
        documents = [it._replace(token_ids=change(it.token_ids)) for it in self.documents]
        turns = [it._replace(token_ids=change(it.token_ids)) for it in self.turns]
        return replace(self, documents=documents, turns=turns)

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """Token ids of system message, documents and turns, without what ends the last answer."""
        _, between, after = self._frame
        before = "".join(self.stops)
        ids = [*self.beginning]
        for turn in turns:
            ids += self.tokenizer.encode_marked(before + turn.question + after)
            ids += turn.token_ids
            before = between
        return ids

    def slide(self, turns: Sequence[Turn], most: int) -> Sequence[Turn]:
        """The latest of `turns`, at least one, that with documents take at most `most` tokens."""
        # A quarter goes at a time, so that few questions make the model read all turns again.
        while len(turns) > 1 and len(self.ids(turns)) > most:
            turns = turns[(len(turns) + 3) // 4 :]
        return turns

    def as_note(self) -> str:
        """The conversation as JSON, from which `restored` makes it again."""
        return json.dumps([self.system, self.documents, self.turns])

    def restored(self, note: str) -> "Conversation":
        """Makes the conversation that `as_note` wrote as JSON. Raises `InputError`."""
        with explain("the snapshot holds no conversation", "load one of /save"):
            system, documents, turns = json.loads(note)
            parts = [Document(*fields) for fields in documents], [Turn(*fields) for fields in turns]
            return Conversation(self.tokenizer, system, *parts)


def title_of(file: Path) -> str:
    """When a kept conversation was last used, and its first question; "" if it cannot be read."""
    with suppress(Exception):  # damaged files raise all kinds
        when = time.ctime(file.stat().st_mtime)
        return f"the chat of {when}, {json.loads(file.read_text('utf-8'))[2][0][0]!r:.60}"
    return ""
