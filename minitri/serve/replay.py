"""Answers as the token ids that were generated, kept under the conversations that they belong to.

A client sends an answer back as text, which may be cut into tokens in another way, and a call with
other spaces. With the very tokens the next prompt begins like the last one and its answer, whose K
and V are at hand. A conversation is found by what its messages say, not by how they are spelled.
"""

import hashlib
import json
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minitri.serve.answer_parser import THINK, Piece
from minitri.serve.messages import Message

MAX_KEPT_TOKENS = 1 << 22
"""Of all conversations together, of 4 bytes each."""


@dataclass(frozen=True)
class Kept:
    """A prompt and its answer."""

    token_ids: Sequence[int]
    prompt: tuple[int, bytes]
    """How long its text is, and a hash of that."""


class Replay:
    """What is kept: of each conversation what was used last, as much as there is room for."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: bytes, prompt: str, token_ids: Sequence[int]) -> None:
        """Keeps a prompt and its answer, under the key of the conversation with it."""
        with self._lock:
            self._drop(self._kept.pop(key, None))
            self._kept[key] = Kept(array("i", token_ids), fingerprint(prompt))
            self._num_tokens += len(token_ids)
            while self._num_tokens > self._max_tokens:
                self._drop(self._kept.popitem(last=False)[1])

    def _drop(self, kept: Kept | None) -> None:
        self._num_tokens -= len(kept.token_ids) if kept else 0

    def find(self, keys: Sequence[bytes]) -> tuple[int, Kept] | None:
        """The last of these that is kept, with its index."""
        with self._lock:
            for index in reversed(range(len(keys))):
                if keys[index] in self._kept:
                    self._kept.move_to_end(keys[index])
                    return index, self._kept[keys[index]]
        return None


def keys_of(messages: Sequence[Message], *context: Any) -> list[bytes]:
    """Keys of a conversation up to each of its messages, in a context: whose it is, with which
    tools."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    keys = []
    for it in messages:
        calls = [call["function"] for call in it.get("tool_calls", ())]
        said = [it["role"], it["content"].strip(), calls]
        digest.update(json.dumps(said, sort_keys=True).encode())
        keys.append(digest.digest())
    return keys


def as_message(pieces: Sequence[Piece]) -> Message:
    """An answer as `read_messages` gives it when it comes back. Raises `ValueError` if its calls
    are not whole."""
    content = "".join(text for kind, text in pieces if kind == "content")
    calls: list[tuple[str, str]] = []
    for kind, text in pieces:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    functions = [{"name": name, "arguments": json.loads(text)} for name, text in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"function": function} for function in functions],
    }


def rest_after(
    kept: Kept,
    messages: Sequence[Message],
    index: int,
    render: Callable[[Sequence[Message]], str],
    ends: Sequence[str],
) -> str | None:
    """The text of a conversation from the end token of a kept answer on, which is one of `ends`.
    None if the template now writes what stands before the answer in another way."""
    mark = secrets.token_hex(16)
    answer = messages[index]
    marked: Message = {"role": "assistant", "content": mark}
    if calls := answer.get("tool_calls"):  # a template may look whether there are some
        call = calls[0] | {"function": {"name": mark, "arguments": {}}}
        marked = {"role": "assistant", "content": "", "tool_calls": [call]}
    before, found, after = render([*messages[:index], marked, *messages[index + 1 :]]).rpartition(
        mark
    )
    length, hashed = kept.prompt
    starts = [start for start in map(after.find, ends) if start >= 0]
    if not (found and starts and fingerprint(before[:length]) == (length, hashed)):
        return None
    return after[min(starts) :]


def fingerprint(prompt: str) -> tuple[int, bytes]:
    """By which a text is known again, up to a thought that it opens."""
    text = prompt.rstrip()
    text = text.removesuffix(THINK) if text.endswith(THINK) else prompt
    return len(text), hashlib.sha256(text.encode("utf-8", "replace")).digest()
