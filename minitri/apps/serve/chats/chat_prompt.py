"""Conversation of a request: token ids of its prompt, and how its answer is read and kept."""

import itertools
import json
import re
from collections.abc import Sequence

from minitri import End, Engine, InputError
from minitri.apps.serve.bodies.chat_body import Conversation
from minitri.apps.serve.chats.answer_parser import END_THINK, THINK, AnswerParser, Piece
from minitri.apps.serve.chats.messages import Turn, one_call_each, read_turns
from minitri.apps.serve.chats.replay import Kept, Replay, as_turn, digest_of, keys_of
from minitri.apps.serve.chats.tools import calls_grammar, format_of, tools_for_template


class ChatPrompt:
    """Prompt of a chat, in the form of the model's template, and the reader of its answer."""

    def __init__(
        self, asked: Conversation, engine: Engine, replay: Replay, owner: str = ""
    ) -> None:
        """Conversations of other owners are not reused. Raises `InputError`."""
        tools = tools_for_template(asked)
        self._names = [*asked.callable_functions]
        self._replay = replay
        self._tokenizer = engine.tokenizer
        self._ends = engine.config.eos_token_ids
        self._turns = read_turns(asked.messages)
        self._context = (owner, tools)
        goes_on = asked.continue_final_message
        if goes_on and asked.tool_choice not in ("auto", "none"):
            got = f"tool_choice is {json.dumps(asked.tool_choice)}"
            raise InputError(f"{got} for an answer that goes on; leave it out")
        self.begun = self._turns.pop()["content"] if goes_on else ""
        template = self._tokenizer.chat_template
        source = template.tool_source if template is not None else ""
        has_calls = any(turn.keys() & {"tool_calls", "tool_call_id"} for turn in self._turns)
        if template is not None and (has_calls or tools) and "tools" not in source:
            problem = "this model's chat template leaves tools out"
            raise InputError(f"{problem}; send no tools, or use a model that was made for them")
        form = format_of(source)
        self._is_single = form.is_bare
        turns = [*one_call_each(self._turns)] if form.is_bare else self._turns
        self.text = self._tokenizer.render_chat(turns, tools)
        self._thinks = self.text.rstrip().endswith(THINK)
        self._form = form if self._names else None
        tags = [THINK, END_THINK, *((form.opening, form.closing) if self._names else ())]
        controls = self._tokenizer.control_ids(tags)
        self.shown = frozenset(controls.values())
        self.token_ids = self._encoded()
        how = {"thinks": self._thinks, "may_think": THINK in source}
        self.grammar = "" if goes_on else calls_grammar(asked, form, controls, **how)

    def _encoded(self) -> list[int]:
        """Token ids of the prompt. They begin with the very tokens of the last prompt and its
        answer, if these are kept and the template still writes that prompt as it did."""
        encode = self._tokenizer.encode_marked
        begun = encode(self.begun) if self.begun else []
        match = self._replay.find(keys_of(self._turns, *self._context))
        if match is None:
            return encode(self.text) + begun
        index, kept = match
        end = self._end_of(self._turns[index], kept)
        ids = encode(self.text[end:])
        if end == 0:
            return ids + begun
        if kept.token_ids[-1] in self._ends:
            ids = ids[1:]  # the end token, which the answer has
        return [*kept.token_ids, *ids, *begun]

    def _end_of(self, answer: Turn, kept: Kept) -> int:
        """Place in the text of the end token of a kept answer; 0 if unsure, or if the template
        writes the prompt before it in another way."""
        start = kept.length
        if digest_of(self.text[:start]) != kept.digest:
            return 0
        words = filter(None, map(self._tokenizer.token, self._ends))
        ends = re.finditer("|".join(map(re.escape, words)), self.text[start:])
        calls = answer.get("tool_calls", [])
        num_before = len(calls) - 1 if self._is_single and calls else 0
        end = next(itertools.islice(ends, num_before, None), None)
        if end is None:
            return 0
        written = self.text[start : start + end.start()]
        texts = [answer["content"].strip(), *(call["function"]["name"] for call in calls)]
        return start + end.start() if all(text in written for text in texts) else 0

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
