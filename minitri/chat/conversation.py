"""A conversation as token ids that only grow, so that the KV cache holds all but the latest words.

    talk = Conversation(engine.tokenizer, system="Be brief.", documents=["Persuasion, by ..."])
    prompt = talk.ask("Who is Anne?")           # for Engine.generate
    talk.answered(token_ids, "Anne is ...")

The model's chat template says how it is written. What stands between two answers is rendered with
marks in the places of the answers and of the question, and cut there; so what has been said is
never written anew. A model without a template gets plain questions and answers.
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
        """All that was said."""
        self._is_first = True
        self._end = ""
        encode = tokenizer.encode_marked if self.has_template else tokenizer.encode  # with BOS
        self._documents_ids = encode(self._until_question()[0])

    @property
    def stops(self) -> tuple[str, ...]:
        """Where an answer ends, if no end token says so."""
        return () if self.has_template else (QUESTION,)

    @property
    def beginning(self) -> list[int]:
        """Token ids of all that stands before the first question: to be read beforehand."""
        return list(self._documents_ids)

    def ask(self, question: str) -> list[int]:
        """Token ids of the conversation with another question, up to where the answer begins."""
        check_unicode(question, "the question")
        before, after = self._until_question() if self._is_first else self._until_next_question()
        if self._is_first:
            self._asked = self._documents_ids + self._tokenizer.encode_marked(question + after)
        else:
            self._asked = self.tokens + self._tokenizer.encode_marked(before + question + after)
        return list(self._asked)

    def answered(self, token_ids: Sequence[int], text: str, end: str = "") -> None:
        """Takes in the answer to the last question: as far as it was given.

        `end` is how its end token is spelled, if it ended with one.
        """
        ids = list(token_ids) if self.has_template else self._tokenizer.encode_marked(text)
        self.tokens = self._asked + ids
        self._is_first = False
        self._end = end

    def reset(self) -> None:
        """Forgets all questions and answers; documents stay."""
        self.tokens = []
        self._is_first = True

    def as_note(self) -> str:
        """All of it, for `restore`."""
        state = {"documents": self._documents_ids, "tokens": self.tokens, "first": self._first}
        return json.dumps(state | {"is_first": self._is_first, "end": self._end})

    def restore(self, note: str) -> None:
        """Goes on where another conversation was. Raises `InputError`."""
        try:
            state = json.loads(note)
            kinds = {"documents": list, "tokens": list, "first": list, "is_first": bool, "end": str}
            values = [state[name] for name in kinds]
            if list(map(type, values)) != [*kinds.values()]:
                raise TypeError
        except (ValueError, LookupError, TypeError):
            raise InputError(
                "the snapshot holds no conversation; load one that /save of this program wrote"
            ) from None
        self._documents_ids, self.tokens, self._first, self._is_first, self._end = values

    def _until_question(self) -> tuple[str, str]:
        """What stands before and after the first question."""
        if not self.has_template:
            system = "".join(f"{message['content']}\n\n" for message in self._first)
            return system + self._documents + QUESTION, ANSWER
        return self._rendered([{"role": "user", "content": self._documents + MARK}])

    def _until_next_question(self) -> tuple[str, str]:
        """What stands between the last answer and the question, and after that."""
        if not self.has_template:
            return QUESTION, ANSWER
        turns = [("user", "x"), ("assistant", EARLIER), ("user", MARK)]
        before, after = self._rendered([{"role": who, "content": what} for who, what in turns])
        before = before.rpartition(EARLIER)[2]
        return before.removeprefix(self._end), after

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        template = self._tokenizer.chat_template
        assert template is not None
        before, mark, after = template.render([*self._first, *messages]).rpartition(MARK)
        if not mark:
            raise InputError("the model's chat template leaves questions out; use another model")
        return before, after
