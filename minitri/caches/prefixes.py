"""The prefix cache: what the rows of a full cache still hold of texts that have ended, so that a
text which begins like one of them need not be read from its start.

A row without a text has the length 0, so that it costs no attention; but the passes of other rows
write what means nothing to its first slots. These are put aside when its text ends, and put back
when the next one takes over. Only K, V and their tokens are kept: all else is made anew from them
and from the last tokens of the prompt, which are always read.

Legend: L layers, B rows, T tokens, K KV heads, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minitri.caches.full import FullCache


class KVSource(Protocol):
    """Tokens whose K and V are at hand."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def num_exact(self) -> int:
        """First tokens that another text may begin with: the K and V of those that were generated
        may differ in the last bits from what a prefill would give."""

    def layers(self, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values (K, T, D) of the first T tokens, layer by layer; each pair is valid until
        the next is asked for."""


@dataclass(frozen=True)
class HeldRow:
    """A `KVSource`: a row of a full cache, whose text has ended or goes on."""

    full: FullCache
    b: int
    tokens: list[int]
    num_exact: int
    first: tuple[Tensor, Tensor] | None = None
    """Keys and values (L, K, T, D) of the first tokens, where they may have been written over."""

    def layers(self, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        for layer, pair in enumerate(self.full.held_layers(self.b)):
            keys_KTD, values_KTD = (slots_KSD[:, :num_tokens] for slots_KSD in pair)
            if self.first is not None:
                keys_KTD = restored(keys_KTD, self.first[0][layer])
                values_KTD = restored(values_KTD, self.first[1][layer])
            yield keys_KTD, values_KTD


def restored(slots_KTD: Tensor, first_KTD: Tensor) -> Tensor:
    """A copy of these slots, the first of them written over."""
    first_KTD = first_KTD[:, : slots_KTD.shape[1]].to(slots_KTD.device)
    return torch.cat((first_KTD, slots_KTD[:, first_KTD.shape[1] :]), 1)


class PrefixCache:
    """The rows of a full cache as places where the next texts may begin."""

    def __init__(self, full: FullCache, num_guarded: int, *, reads_alike: bool) -> None:
        """The passes of other rows write to at most `num_guarded` slots of a row without a text.
        `reads_alike`: K and V of tokens that were generated count as those of a prompt. On compiled
        kernels they do not, since decoding has kernels of its own, which round otherwise: a text
        is, to the bit, what it would be without this cache."""
        self._full = full
        self._num_guarded = num_guarded
        self._reads_alike = reads_alike
        self._ended = [HeldRow(full, b, [], 0) for b in range(len(full.lengths))]
        self._num_certain = list(full.lengths)
        self.num_prompt = list(full.lengths)
        """Tokens of each row's prompt."""
        self.snapshot: KVSource | None = None

    def note_certain(self) -> None:
        """What the full cache holds now will stay; what a step adds may be taken back."""
        self._num_certain = list(self._full.lengths)

    def _num_exact(self, b: int) -> int:
        held = self._num_certain[b]
        return held if self._reads_alike else min(held, self.num_prompt[b] - 1)

    @property
    def longest(self) -> HeldRow | None:
        """The row that holds the most tokens of a text that has ended."""
        row = max(self._ended, key=lambda row: len(row.tokens))
        return row if row.tokens else None

    def num_shared(self, prompt: list[int]) -> int:
        """Tokens of the prompt that are at hand, in whichever row without a text."""
        return max(num_common(row, prompt) for row in self._ended)

    def keep(self, b: int, text: list[int]) -> None:
        """The text of row b ends; call before its reset."""
        if self._num_certain[b]:  # else it has not begun, and what stood there before still does
            self._guard(b, text[: self._num_certain[b]], self._num_exact(b))
            self._num_certain[b] = 0

    def _guard(self, b: int, tokens: list[int], num_exact: int) -> None:
        """Row b holds these tokens; the first are put aside."""
        first = self._full.tokens(b, 0, min(len(tokens), self._num_guarded))
        keys, values = (slots_LKTD.clone() for slots_LKTD in first)
        self._ended[b] = HeldRow(self._full, b, tokens, num_exact, (keys, values))

    def adopt(self, other: "PrefixCache") -> None:
        """Takes over what another cache holds, as far as there is room for it."""
        self.snapshot = other.snapshot
        held = (row for row in other._ended if row.tokens)
        longest = sorted(held, key=lambda row: -len(row.tokens))[: len(self._ended)]
        is_same = self._full is other._full
        for place, row in enumerate(longest):
            b = row.b if is_same else place
            num_tokens = min(len(row.tokens), self._full.capacity)
            self._fill(b, row, num_tokens)
            self._guard(b, row.tokens[:num_tokens], min(row.num_exact, num_tokens))

    def best_place(self, places: list[int], prompt: list[int]) -> int:
        """Of rows without a text the one where a prompt saves most copying and loses least."""

        def gain(b: int) -> int:
            row = self._ended[b]
            return 2 * num_common(row, prompt) - len(row.tokens)

        return max(places, key=gain)

    def take(self, b: int, texts: list[list[int]], most: int) -> int:
        """Fills row b, which is empty, with the longest beginning of its text that is at hand, of
        at most `most` tokens; returns how many. `texts` are those of all rows."""
        prompt = texts[b]
        sources: list[KVSource] = [*self._ended]
        for other, text in enumerate(texts):
            if num_exact := self._num_exact(other):
                sources.append(HeldRow(self._full, other, text[:num_exact], num_exact))
        if self.snapshot is not None:
            sources.append(self.snapshot)
        own = self._ended[b]
        self._ended[b] = HeldRow(self._full, b, [], 0)
        if most <= 0:
            return 0
        # Of equally long ones the row's own, which need not be copied.
        best = max(sources, key=lambda it: (num_common(it, prompt), it is own))
        num_tokens = min(num_common(best, prompt), most)
        if num_tokens:
            self._fill(b, best, num_tokens)
        self._full.restore(b, num_tokens)
        self.note_certain()
        return num_tokens

    def _fill(self, b: int, source: KVSource, num_tokens: int) -> None:
        """Copies K and V of the first tokens into row b, as far as they are not there."""
        if isinstance(source, HeldRow) and (source.full, source.b) == (self._full, b):
            assert source.first is not None
            for layer, (keys_KTD, values_KTD) in enumerate(zip(*source.first, strict=True)):
                self._full.write(layer, b, keys_KTD, values_KTD)
            return
        for layer, (keys_KTD, values_KTD) in enumerate(source.layers(num_tokens)):
            self._full.write(layer, b, keys_KTD, values_KTD)


def num_common(source: KVSource, prompt: list[int]) -> int:
    """How many tokens of a prompt may be taken from a source."""
    longest = min(source.num_exact, len(prompt))
    tokens = source.tokens
    if tokens[:longest] == prompt[:longest]:
        return longest
    pairs = zip(tokens, prompt, strict=False)
    return next(number for number, (token, other) in enumerate(pairs) if token != other)
