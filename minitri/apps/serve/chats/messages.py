"""Messages of a chat as chat templates want them: one text each, arguments of calls as objects."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from minitri import InputError
from minitri.core.errors import explain, shorten

KNOWN = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
Message = dict[str, Any]


def read_messages(messages: Any) -> list[Message]:
    """Those of a request. Raises `InputError`, which says where."""
    if not messages:
        raise InputError("messages is empty; send one at least")
    listed = messages if isinstance(messages, list) else [messages]
    called: dict[str, str] = {}  # names of functions, by the ids of their calls
    return [_read(it, f"messages[{number}]", called) for number, it in enumerate(listed)]


def _read(message: Any, where: str, called: dict[str, str]) -> Message:
    match message:
        case {"role": str(role), **others} if not any(others[it] for it in others.keys() - KNOWN):
            pass
        case _:
            raise InputError(f"{where} is {shorten(repr(message), 60)}; give a role and a content")
    content = others.get("content")
    if content is None and role == "assistant":
        content = ""
    parts = content if isinstance(content, list) else [content]
    found: Message = {"role": role, "content": "".join(_text(part, where) for part in parts)}
    if isinstance(thought := others.get("reasoning_content"), str):
        found["reasoning_content"] = thought
    if calls := others.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise InputError(f"{where}.tool_calls is of the role {shorten(role, 60)}; leave it out")
        found["tool_calls"] = [_call(it, f"{where}.tool_calls[{n}]") for n, it in enumerate(calls)]
        for call, new in zip(calls, found["tool_calls"], strict=True):
            called[call["id"]] = new["function"]["name"]
    if role == "tool":
        call = others.get("tool_call_id")
        if not isinstance(call, str) or call not in called:
            got = f"{where}.tool_call_id is {shorten(repr(call), 60)}"
            raise InputError(f"{got}, which no message before it calls; send the id of a call")
        found |= {"tool_call_id": short_id(call), "name": called[call]}
    return found


def _text(part: Any, where: str) -> str:
    match part:
        case str(text) | {"type": "text", "text": str(text)}:
            return text
    got = f"{where}.content has {shorten(repr(part), 60)}"
    raise InputError(f"{got}; give a text, or parts of type text")


def _call(call: Any, where: str) -> Message:
    match call:
        case {"id": str(key), "function": {"name": str(name), "arguments": str(arguments)}}:
            with explain(f"{where}.function.arguments are no object of JSON", "send them as made"):
                function = {"name": name, "arguments": {**json.loads(arguments or "{}")}}
            return {"id": short_id(key), "type": "function", "function": function}
    got = f"{where} is {shorten(repr(call), 60)}"
    raise InputError(f"{got}; give an id, and a function with a name and arguments")


def short_id(key: str) -> str:
    """An id of a call as all templates allow it: Mistral's want nine letters and digits."""
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", key)
    return key if is_short else hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:9]


def one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages of which none has several calls, for templates that refuse those."""
    for message in messages:
        first, *others = message.get("tool_calls", ()) or [None]
        yield message | ({"tool_calls": [first]} if others else {})
        yield from ({"role": "assistant", "content": "", "tool_calls": [it]} for it in others)
