"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

    talk = Conversation(engine.tokenizer, system="Be brief.", documents=["Persuasion, by ..."])
    prompt = talk.ask("Who is Anne?")           # for Engine.generate
    talk.answered(prompt, token_ids, "Anne is ...")

The model's chat template says how it is written. What stands between two answers is rendered with
marks in the places of the answers and of the question, and cut there; so what has been said is
never written again. A model without a template gets plain questions and answers.
"""

import json
from collections.abc import Sequence

from minitri.errors import InputError, check_unicode
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
        self.has_template = tokenizer.chat_template is not None
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._documents = "".join(text.rstrip("\n") + "\n\n" for text in documents)
        self.tokens: list[int] = []
        """All that was said; empty before the first answer, and to forget questions and answers."""
        self._end = ""
        encode = tokenizer.encode_marked if self.has_template else tokenizer.encode  # with BOS
        self.beginning = encode(self._around_question()[0])
        """All that stands before the first question: to be read beforehand."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Where an answer ends, if no end token says so."""
        return () if self.has_template else (QUESTION,)

    def ask(self, question: str) -> list[int]:
        """Token ids of the conversation with another question, up to where the answer begins."""
        check_unicode(question, "the question")
        before, after = self._around_question()
        if not self.tokens:
            return self.beginning + self._tokenizer.encode_marked(question + after)
        return self.tokens + self._tokenizer.encode_marked(before + question + after)

    def answered(
        self, prompt: list[int], token_ids: Sequence[int], text: str, end: str = ""
    ) -> None:
        """Takes in the answer to a prompt of `ask`: as far as it was given.

        `end` is how its end token is spelled, if it ended with one.
        """
        ids = list(token_ids) if self.has_template else self._tokenizer.encode_marked(text)
        self.tokens = prompt + ids
        self._end = end

    def as_note(self) -> str:
        """All of it, for `restore`."""
        return json.dumps([self.beginning, self.tokens, self._first, self._end])

    def restore(self, note: str) -> None:
        """Goes on where another conversation was. Raises `InputError`."""
        try:
            self.beginning, self.tokens, self._first, self._end = json.loads(note)
        except (ValueError, TypeError):
            raise InputError("the snapshot holds no conversation; load one of /save") from None

    def _around_question(self) -> tuple[str, str]:
        """What stands before the next question, from the last answer on, and what after it."""
        if not self.has_template:
            system = "".join(f"{message['content']}\n\n" for message in self._first)
            before = "" if self.tokens else system + self._documents
            return before + QUESTION, ANSWER
        turns = [("user", self._documents + MARK)]
        if self.tokens:
            turns = [("user", "x"), ("assistant", EARLIER), ("user", MARK)]
        messages = [{"role": who, "content": what} for who, what in turns]
        template = self._tokenizer.chat_template
        assert template is not None
        before, mark, after = template.render([*self._first, *messages]).rpartition(MARK)
        if not mark:
            raise InputError("the model's chat template leaves questions out; use another model")
        return before.rpartition(EARLIER)[2].removeprefix(self._end), after
