"""The conversation of a request: token ids of its prompt, and how its answer is read and kept."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from minitri import End, Engine, InputError
from minitri.apps.serve.chats.answer_parser import END_THINK, THINK, AnswerParser, Piece
from minitri.apps.serve.chats.messages import Message, one_call_each, read_messages
from minitri.apps.serve.chats.replay import Replay, as_message, digest_of, keys_of
from minitri.apps.serve.chats.tools import Tools, format_of


class ChatPrompt:
    """What a model reads before it answers, in the form that its template gives it."""

    def __init__(
        self,
        messages: Any,
        tools: Tools,
        engine: Engine,
        replay: Replay,
        encode: Callable[[str], list[int]],
        *,
        owner: str = "",
        goes_on: bool = False,
    ) -> None:
        """`encode` makes token ids of a text with control tokens. `goes_on`: the last message is
        the beginning of the answer. Raises `InputError`."""
        self._replay = replay
        self._tokenizer = engine.tokenizer
        self._ends = engine.config.eos_token_ids
        self._turns = read_messages(messages)
        self._tools = tools.for_template
        self.begun = self._turns.pop()["content"] if goes_on else ""
        template = self._tokenizer.chat_template
        source = template.tool_source if template is not None else ""
        has_calls = any(it.keys() & {"tool_calls", "tool_call_id"} for it in self._turns)
        if template is not None and (has_calls or self._tools) and "tools" not in source:
            problem = "this model's chat template leaves tools out"
            raise InputError(f"{problem}; send no tools, or use a model that was made for them")
        form = format_of(source)
        self._is_single = form.is_bare
        turns = [*one_call_each(self._turns)] if form.is_bare else self._turns
        self.text = self._tokenizer.render_chat(turns, self._tools)
        self._context = (owner, self._tools)
        self._thinks = self.text.rstrip().endswith(THINK)
        self._form = form if tools.names else None
        self._names = tools.names
        tags = [THINK, END_THINK, *((form.opening, form.closing) if tools.names else ())]
        controls = self._tokenizer.control_ids(tags)
        self.shown = frozenset(controls.values())
        self.token_ids = self._encoded(encode)
        self.grammar = ""
        if not goes_on:
            may_think = THINK in source
            self.grammar = tools.grammar(form, controls, thinks=self._thinks, may_think=may_think)
        elif tools.choice not in ("auto", "none"):
            choice = json.dumps(tools.choice)
            raise InputError(f"tool_choice is {choice} for an answer that goes on; leave it out")

    def _encoded(self, encode: Callable[[str], list[int]]) -> list[int]:
        """The prompt, which begins with the very tokens of the last prompt and its answer, if these
        are kept, and the template still writes that prompt as it did."""
        kept_ids: list[int] = []
        rest = self.text
        found = self._replay.find(keys_of(self._turns, *self._context))
        if found is not None:
            index, kept = found
            end = self._end_of(self._turns[index], kept.length)
            if end and digest_of(self.text[: kept.length]) == kept.digest:
                rest = self.text[end:]
                kept_ids = [*kept.token_ids]
        ids = encode(rest)
        if kept_ids and kept_ids[-1] in self._ends:
            ids = ids[1:]  # the end token, which the answer has
        return kept_ids + ids + (encode(self.begun) if self.begun else [])

    def _end_of(self, answer: Message, start: int) -> int:
        """Where the end token of an answer stands in the text, in which it begins at `start`; 0 if
        that is not certain."""
        calls = answer.get("tool_calls", [])
        words = filter(None, map(self._tokenizer.token, self._ends))
        ends = re.finditer("|".join(map(re.escape, words)), self.text[start:])
        place = max(1, len(calls)) if self._is_single else 1
        end = next(itertools.islice((it.start() for it in ends), place - 1, None), 0)
        said = [answer["content"].strip(), *(call["function"]["name"] for call in calls)]
        is_certain = all(it in self.text[start : start + end] for it in said)
        return start + end if end and is_certain else 0

    def parser(self) -> AnswerParser:
        """Reads an answer to this, from where it goes on."""
        made = AnswerParser(self._form, self._names, thinks=self._thinks)
        made.push(self.begun)
        return made

    def keep(self, pieces: Sequence[Piece], end: End) -> None:
        """Keeps an answer for the requests that go on after it, unless it is not all of what was
        generated, or has calls that are not whole."""
        if end.finish_reason == "stop":
            return
        try:
            answer = as_message([Piece("content", self.begun), *pieces])
        except ValueError:
            return
        key = keys_of([*self._turns, answer], *self._context)[-1]
        self._replay.keep(key, self.text, [*self.token_ids, *end.token_ids])
