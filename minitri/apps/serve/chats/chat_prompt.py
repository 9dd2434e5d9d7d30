"""Conversation of a request: token ids of its prompt, and how its answer is read and kept."""

import itertools
import json
import re
from collections.abc import Sequence

from minitri import End, Engine, InputError
from minitri.apps.serve.bodies.chat_body import Conversation
from minitri.apps.serve.chats.answer_parser import END_THINK, THINK, AnswerParser, Piece
from minitri.apps.serve.chats.messages import Turn, one_call_each, read_turns
from minitri.apps.serve.chats.replay import Replay, as_turn, digest_of, keys_of
from minitri.apps.serve.chats.tools import Tools, format_of


class ChatPrompt:
    """Prompt of a chat, in the form of the model's template, and the reader of its answer."""

    def __init__(
        self,
        asked: Conversation,
        engine: Engine,
        replay: Replay,
        owner: str = "",
    ) -> None:
        """Conversations of other owners are not reused. Raises `InputError`."""
        tools = Tools.of(asked)
        self._names = tools.names
        self._replay = replay
        self._tokenizer = engine.tokenizer
        self._ends = engine.config.eos_token_ids
        self._turns = read_turns(asked.messages)
        self._context = (owner, tools.for_template)
        goes_on = asked.continue_final_message
        self.begun = self._turns.pop()["content"] if goes_on else ""
        template = self._tokenizer.chat_template
        source = template.tool_source if template is not None else ""
        has_calls = any(turn.keys() & {"tool_calls", "tool_call_id"} for turn in self._turns)
        if template is not None and (has_calls or tools.for_template) and "tools" not in source:
            problem = "this model's chat template leaves tools out"
            raise InputError(f"{problem}; send no tools, or use a model that was made for them")
        form = format_of(source)
        self._is_single = form.is_bare
        turns = [*one_call_each(self._turns)] if form.is_bare else self._turns
        self.text = self._tokenizer.render_chat(turns, tools.for_template)
        self._thinks = self.text.rstrip().endswith(THINK)
        self._form = form if tools.names else None
        tags = [THINK, END_THINK, *((form.opening, form.closing) if tools.names else ())]
        controls = self._tokenizer.control_ids(tags)
        self.shown = frozenset(controls.values())
        self.token_ids = self._encoded()
        if goes_on and tools.choice not in ("auto", "none"):
            choice = json.dumps(tools.choice)
            raise InputError(f"tool_choice is {choice} for an answer that goes on; leave it out")
        how = {"thinks": self._thinks, "may_think": THINK in source}
        self.grammar = "" if goes_on else tools.grammar(form, controls, **how)

    def _encoded(self) -> list[int]:
        """Token ids of the prompt. They begin with the very tokens of the last prompt and its
        answer, if these are kept and the template still writes that prompt as it did."""
        encode = self._tokenizer.encode_marked
        kept_ids: list[int] = []
        rest = self.text
        match = self._replay.find(keys_of(self._turns, *self._context))
        if match is not None:
            index, kept = match
            end = self._end_of(self._turns[index], kept.length)
            if end and digest_of(self.text[: kept.length]) == kept.digest:
                rest = self.text[end:]
                kept_ids = [*kept.token_ids]
        ids = encode(rest)
        if kept_ids and kept_ids[-1] in self._ends:
            ids = ids[1:]  # the end token, which the answer has
        return kept_ids + ids + (encode(self.begun) if self.begun else [])

    def _end_of(self, answer: Turn, start: int) -> int:
        """Place in the text of the end token of an answer that begins at `start`; 0 if unsure."""
        calls = answer.get("tool_calls", [])
        words = filter(None, map(self._tokenizer.token, self._ends))
        ends = re.finditer("|".join(map(re.escape, words)), self.text[start:])
        place = max(1, len(calls)) if self._is_single else 1
        end = next(itertools.islice((match.start() for match in ends), place - 1, None), 0)
        texts = [answer["content"].strip(), *(call["function"]["name"] for call in calls)]
        is_there = all(text in self.text[start : start + end] for text in texts)
        return start + end if end and is_there else 0

    def parser(self) -> AnswerParser:
        """Parser of an answer, which has read what the answer begins with."""
        made = AnswerParser(self._form, self._names, thinks=self._thinks)
        made.push(self.begun)
        return made

    def keep(self, pieces: Sequence[Piece], end: End) -> None:
        """Keeps an answer for the requests that continue the conversation, unless a stop string has
        cut it, or its calls are incomplete."""
        if end.finish_reason == "stop":
            return
        try:
            answer = as_turn([Piece("content", self.begun), *pieces])
        except ValueError:
            return
        key = keys_of([*self._turns, answer], *self._context)[-1]
        self._replay.keep(key, self.text, [*self.token_ids, *end.token_ids])
