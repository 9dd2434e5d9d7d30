"""Chat messages as chat templates expect them: plain text, tool-call arguments as objects."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from minitri import InputError
from minitri.apps.serve.bodies.chat_body import Message
from minitri.core.errors import shorten

Turn = dict[str, Any]


def read_turns(messages: Sequence[Message]) -> list[Turn]:
    """Messages for a template. Raises `InputError`, which says where."""
    if not messages:
        raise InputError("messages is empty; send one at least")
    turns: list[Turn] = []
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for number, message in enumerate(messages):
        fields = message.model_dump(exclude={"name"})
        given = {name: value for name, value in fields.items() if value}
        turn: Turn = {"role": message.role, "content": message.content} | given
        for call in turn.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            call["id"] = short_id(call["id"])
        if message.role == "tool":
            call_id = message.tool_call_id
            if call_id not in names:
                got = f"messages[{number}].tool_call_id is {shorten(repr(call_id), 60)}"
                raise InputError(f"{got}, which no message before it calls; send the id of a call")
            turn |= {"tool_call_id": short_id(call_id), "name": names[call_id]}
        turns.append(turn)
    return turns


def short_id(call_id: str) -> str:
    """Id of a call as all templates allow it: Mistral's want nine letters and digits."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def one_call_each(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Messages of which none has several calls, for templates that refuse those."""
    for turn in turns:
        first, *others = turn.get("tool_calls", ()) or [None]
        yield turn | ({"tool_calls": [first]} if others else {})
        for call in others:
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
