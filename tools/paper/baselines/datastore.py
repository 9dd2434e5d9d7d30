"""A drafter that looks the last words up in a datastore: the tokens of many texts on disk (REST).

    store = open_datastore(Path("novels.datastore"), tokenizer)
    engine = minitri.load("smollm2-135m", drafter=store)

One safetensors file, mapped into memory, not read. `tokens` are all texts, each with the number
after the largest token at its end. `order` are the places of `tokens`, sorted by what stands there
and before it, read backwards, up to `LONGEST` tokens. So all places whose last words agree with
those of a text stand together, and bisection finds them. The manifest says whose vocabulary the
tokens are of. REST: He et al. 2023, arXiv 2311.08252; a suffix array of the reversed text.
`tools/paper/build_datastore.py` makes such a file.
"""

import hashlib
import json
import zlib
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minitri.errors import InputError, shorten
from minitri.loading.tokenizer import Tokenizer

FORMAT = "minitri datastore 1"
LONGEST = 32
"""Tokens of a match that are compared, a power of 2."""
SHORTEST = 2
"""Tokens that must agree: a single one says too little."""
MOST_PLACES = 64
"""Places that vote on what follows."""
Array = np.ndarray[Any, np.dtype[Any]]


class Datastore:
    """The texts of a file, to be looked up: a `minitri.Drafter`."""

    def __init__(self, tokens: Array, order: Array) -> None:
        self._tokens = tokens
        self._order = order
        self._end = int(tokens[-1])  # stands after every text

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def guess(self, tokens: list[int], row: int) -> int | None:  # noqa: ARG002
        """The token that follows the last words of a text most often here, if they stand here."""
        words = tokens[: -1 - LONGEST : -1]
        place = bisect_left(self._order, words, key=self._before)
        near = self._order[max(place - 1, 0) : place + 1]
        length = max(_num_same(self._before(other), words) for other in near)
        if length < SHORTEST:
            return None
        words = words[:length]

        def beginning(other: int) -> list[int]:
            return self._before(other, length)

        first = bisect_left(self._order, words, hi=place, key=beginning)
        last = bisect_right(self._order, words, lo=place, key=beginning)
        chosen = np.linspace(first, last - 1, min(last - first, MOST_PLACES)).astype(np.int64)
        following = np.minimum(self._order[chosen].astype(np.int64) + 1, len(self._tokens) - 1)
        candidates, counts = np.unique(self._tokens[following], return_counts=True)
        winner = int(candidates[counts.argmax()])
        return winner if winner != self._end else None

    def _before(self, place: int, num_tokens: int = LONGEST) -> list[int]:
        """The token of a place and those before it, backwards."""
        start = max(int(place) + 1 - num_tokens, 0)
        words: list[int] = self._tokens[start : int(place) + 1].tolist()
        return words[::-1]


def _num_same(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return [*(a == b for a, b in pairs), False].index(False)


def sorted_places(tokens: Array) -> Array:
    """All places, sorted by their tokens and those before, backwards; equal ones as in the text.

    By doubling: ranks of k tokens, in pairs, are keys of 2k tokens.
    """
    rank, length = tokens.astype(np.int64), 1
    while True:
        order = np.argsort(rank, kind="stable")
        if length > LONGEST // 2:
            return order
        is_new = np.diff(rank[order], prepend=-1) > 0
        rank[order] = np.cumsum(is_new)  # from 1 on; 0 is the text's beginning
        shifted = np.concatenate((np.zeros(length, np.int64), rank))[: len(rank)]
        rank, length = rank * (len(rank) + 1) + shifted, 2 * length


def write_datastore(path: Path, texts: list[list[int]], tokenizer: Tokenizer) -> int:
    """Writes a file of texts in the tokens of this tokenizer; returns its bytes.

    Raises `InputError`.
    """
    num_tokens = tokenizer.num_tokens
    small = np.uint16 if num_tokens < 1 << 16 else np.uint32
    tokens = np.concatenate([np.array([*text, num_tokens], small) for text in texts])
    order = sorted_places(tokens).astype(np.uint32)
    facts = {
        "format": FORMAT,
        "vocabulary": fingerprint(tokenizer),
        "checksum": _checksum(tokens, order),
    }
    arrays = {"tokens": torch.from_numpy(tokens), "order": torch.from_numpy(order)}
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        save_file(arrays, unfinished, facts)
        unfinished.replace(path)
    except (SafetensorError, OSError) as error:
        reason = shorten(error, 90)
        raise InputError(
            f"cannot write {path} ({reason}); name a file in a folder with room"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)
    return path.stat().st_size


def open_datastore(path: Path, tokenizer: Tokenizer) -> Datastore:
    """Maps a datastore of this tokenizer's tokens into memory. Raises `InputError`."""
    advice = "build it again with tools.paper.build_datastore"
    if not path.is_file():
        raise InputError(f"there is no datastore {path}; {advice}")
    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("format") != FORMAT:
                what = shorten(repr(facts.get("format")), 60)
                raise InputError(f"{path} is no datastore: its format is {what}; {advice}")
            if facts.get("vocabulary") != fingerprint(tokenizer):
                raise InputError(f"the datastore {path} was built with another tokenizer; {advice}")
            tokens, order = (file.get_tensor(name).numpy() for name in ("tokens", "order"))
    except (SafetensorError, OSError) as error:
        reason = shorten(error, 90)
        raise InputError(f"the datastore {path} cannot be read ({reason}); {advice}") from None
    if facts.get("checksum") != _checksum(tokens, order):
        raise InputError(f"the datastore {path} is damaged: its checksum is wrong; {advice}")
    return Datastore(tokens, order)


def _checksum(*arrays: Array) -> str:
    total = 0
    for array in arrays:
        total = zlib.crc32(array.data, total)
    return f"{total:08x}"


def fingerprint(tokenizer: Tokenizer) -> str:
    """What two tokenizers have in common only if they spell every token alike."""
    tokens = [tokenizer.token(number) for number in range(tokenizer.num_tokens)]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
