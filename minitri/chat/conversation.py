"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

What the chat template puts between two answers is rendered with marks in the places of the answers
and of the question, and cut there. A model without one gets plain questions and answers.
"""

import json
from collections.abc import Sequence
from operator import itemgetter

from minitri.errors import InputError, check_unicode, explain
from minitri.loading.tokenizer import Tokenizer

QUESTION, ANSWER = "\nQuestion: ", "\nAnswer:"
"""How a conversation is written for a model without a template."""
MARK, EARLIER = "<|minitri-question|>", "<|minitri-answer|>"


class Conversation:
    """Documents, questions and answers, one after the other."""

    def __init__(
        self, tokenizer: Tokenizer, *, system: str | None = None, documents: Sequence[str] = ()
    ) -> None:
        """`system` tells the model how to behave. Raises `InputError` if its template refuses."""
        self._tokenizer = tokenizer
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._documents = "".join(text.rstrip("\n") + "\n\n" for text in documents)
        self.tokens: list[int] = []
        """All that was said; empty before the first answer, and to forget questions and answers."""
        self._end = ""
        has_template = tokenizer.chat_template is not None
        self.stops = () if has_template else (QUESTION,)
        """Where an answer ends, if no end token says so."""
        encode = tokenizer.encode_marked if has_template else tokenizer.encode  # with BOS
        self.beginning = encode(self._around_question()[0])
        """All that stands before the first question: to be read beforehand."""

    def ask(self, question: str) -> list[int]:
        """Token ids of the conversation with another question, up to where the answer begins."""
        check_unicode(question, "the question")
        before, after = self._around_question()
        if not self.tokens:
            return self.beginning + self._tokenizer.encode_marked(question + after)
        return self.tokens + self._tokenizer.encode_marked(before + question + after)

    def answered(self, prompt: list[int], token_ids: Sequence[int], end: str = "") -> None:
        """Takes in the answer to a prompt of `ask`; `end` is how its end token is spelled."""
        self.tokens = [*prompt, *token_ids]
        self._end = end

    def as_note(self) -> str:
        state = {"documents": self.beginning, "tokens": self.tokens, "first": self._first}
        return json.dumps(state | {"end": self._end})

    def restore(self, note: str) -> None:
        """Goes on where another conversation was. Raises `InputError`."""
        with explain("the snapshot holds no conversation", "load one of /save"):
            found = itemgetter("documents", "tokens", "first", "end")(json.loads(note))
        self.beginning, self.tokens, self._first, self._end = found

    def _around_question(self) -> tuple[str, str]:
        """What stands before the next question, from the last answer on, and what after it."""
        if (template := self._tokenizer.chat_template) is None:
            system = "".join(f"{message['content']}\n\n" for message in self._first)
            return ("" if self.tokens else system + self._documents) + QUESTION, ANSWER
        turns = [("user", self._documents + MARK)]
        if self.tokens:
            turns = [("user", "x"), ("assistant", EARLIER), ("user", MARK)]
        messages = [{"role": who, "content": what} for who, what in turns]
        before, mark, after = template.render([*self._first, *messages]).rpartition(MARK)
        if not mark:
            raise InputError("the model's chat template leaves questions out; use another model")
        return before.rpartition(EARLIER)[2].removeprefix(self._end), after
