"""Store of generated token ids by conversation, so that the next prompt reuses the KV cache.

A client sends an answer back as text, which may be tokenized in another way, and a call with other
spaces. With the very tokens the next prompt begins like the last one and its answer, whose K and V
are cached. The key of a conversation does not depend on how its calls are spelled.
"""

import hashlib
import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from minitri.apps.serve.chats.answer_parser import THINK, Piece
from minitri.apps.serve.chats.messages import Turn

MAX_KEPT_TOKENS = 1 << 22
"""Most tokens of all conversations together; 4 bytes each."""


class Kept(NamedTuple):
    """Tokens of a prompt and its answer."""

    token_ids: Sequence[int]
    length: int
    """Characters of the prompt's text, up to a thought that it opens."""
    digest: bytes
    """SHA-256 of that text."""


class Replay:
    """Least-recently-used store of conversations."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: bytes, prompt: str, token_ids: Sequence[int]) -> None:
        """Keeps a prompt and its answer, under the key of the conversation with it."""
        text = re.sub(rf"{THINK}\s*\Z", "", prompt)
        new = Kept(array("i", token_ids), len(text), digest_of(text))
        with self._lock:
            old = self._kept.pop(key, None)
            self._num_tokens += len(new.token_ids) - (len(old.token_ids) if old else 0)
            self._kept[key] = new
            while self._num_tokens > self._max_tokens:
                self._num_tokens -= len(self._kept.popitem(last=False)[1].token_ids)

    def find(self, keys: Sequence[bytes]) -> tuple[int, Kept] | None:
        """The last of these keys that has a kept conversation: its index, and the tokens."""
        with self._lock:
            for index in reversed(range(len(keys))):
                if kept := self._kept.get(keys[index]):
                    self._kept.move_to_end(keys[index])
                    return index, kept
        return None


def digest_of(text: str) -> bytes:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def keys_of(turns: Sequence[Turn], *context: Any) -> list[bytes]:
    """Keys of a conversation up to each of its messages, in a context: its owner, its tools."""
    digest = hashlib.sha256(json.dumps(context, sort_keys=True).encode())
    keys = []
    for turn in turns:
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        meaning = [turn["role"], turn["content"].strip(), calls]
        digest.update(json.dumps(meaning, sort_keys=True).encode())
        keys.append(digest.digest())
    return keys


def as_turn(pieces: Sequence[Piece]) -> Turn:
    """An answer as `read_turns` gives it when it comes back. Raises `ValueError` if its calls are
    incomplete."""
    content = "".join(text for kind, text in pieces if kind == "content")
    functions: list[dict[str, Any]] = []
    for kind, text in pieces:
        if kind == "call":
            functions.append({"name": text, "arguments": ""})
        elif kind == "arguments":
            functions[-1]["arguments"] += text
    for function in functions:
        function["arguments"] = json.loads(function["arguments"])
    calls = [{"function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": calls}
