"""The prefix cache: what the rows of a full cache still hold of texts that have ended, so that a
text which begins like one of them need not be read from its start.

Such a row has the length 0; the passes of other rows write what means nothing to its first slots,
which are put aside when its text ends.

Legend: L layers, P = 2 keys and values, B rows, T tokens, K KV heads, D head dim.
"""

from typing import Protocol

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.stats import num_common


class Store(Protocol):
    """K and V of prompts that other engines share; see `files/kv_store.py`."""

    def longer(self, tokens: list[int], owner: str, held: HeldRow) -> HeldRow:
        """The longest stored prefix of an owner's text, or `held` if that is not shorter."""

    def write(self, source: HeldRow) -> None:
        """Stores a prompt that was read; returns before it is written."""

    def close(self) -> None:
        """Waits until everything is written."""


class PrefixCache:
    """The rows of a full cache as places where the next texts may begin."""

    def __init__(self, full: FullCache, num_guarded: int, *, reads_alike: bool) -> None:
        """The passes of other rows write to at most `num_guarded` slots of a row without a text.
        `reads_alike`: K and V of tokens that were generated count as those of a prompt. On compiled
        kernels, which round otherwise in decoding, they do not: a text is, to the bit, what it
        would be without this cache."""
        self._full = full
        self._num_guarded = num_guarded
        self._reads_alike = reads_alike
        self._ended = [HeldRow(full, b, []) for b in range(len(full.lengths))]
        self._num_certain = list(full.lengths)
        self._num_prompt = [1] * len(full.lengths)  # tokens of each row's prompt
        self.owners = [""] * len(full.lengths)
        """Of the text of each row, given before `take`."""
        self.snapshot: HeldRow | None = None
        self.store: Store | None = None

    def note_certain(self) -> None:
        """What the full cache holds now will stay; what a step adds may be taken back."""
        self._num_certain = list(self._full.lengths)

    def _num_exact(self, b: int) -> int:
        """Tokens of row b whose K and V are what a prefill gives."""
        held = self._num_certain[b]
        return held if self._reads_alike else min(held, self._num_prompt[b] - 1)

    @property
    def longest(self) -> HeldRow | None:
        """The row that holds the most tokens of a text that has ended."""
        row = max(self._ended, key=lambda row: len(row.tokens))
        return row if row.tokens else None

    def num_shared(self, prompt: list[int]) -> int:
        """Tokens of the prompt that are at hand, in whichever row without a text."""
        return max(num_common(row.tokens, prompt) for row in self._ended)

    def keep(self, b: int, text: list[int]) -> None:
        """The text of row b ends; call before its reset."""
        if self._num_certain[b]:  # else it has not begun, and what stood there before still does
            self._guard(b, text[: self._num_exact(b)], self.owners[b])
            self._num_certain[b] = 0

    def _guard(self, b: int, tokens: list[int], owner: str | None) -> None:
        """Row b holds these tokens; the first are put aside."""
        pair = self._full.tokens(b, 0, min(len(tokens), self._num_guarded))
        self._ended[b] = HeldRow(self._full, b, tokens, owner, torch.stack(pair, 1))

    def adopt(self, other: "PrefixCache") -> None:
        """Takes over what another cache holds, as far as there is room for it."""
        held = sorted(other._ended, key=lambda row: len(row.tokens), reverse=True)
        for place, row in enumerate(held[: len(self._ended)]):
            b = row.b if self._full is other._full else place
            tokens = row.tokens[: self._full.capacity]
            self._fill(b, row, len(tokens))
            self._guard(b, tokens, row.owner)

    def best_place(self, places: list[int], prompt: list[int], owner: str) -> int:
        """Of rows without a text the one where a prompt saves most copying and loses least."""
        rows = [self._ended[b] for b in places]
        return max(rows, key=lambda it: 2 * it.num_shared(prompt, owner) - len(it.tokens)).b

    def take(self, b: int, texts: list[list[int]], most: int) -> int:
        """Fills row b, which is empty, with the longest beginning of its prompt that is at hand for
        its owner, of at most `most` tokens; returns how many. `texts` are those of all rows."""
        self._num_prompt[b] = len(texts[b])
        owner = self.owners[b]
        begun = [
            HeldRow(self._full, i, text[: self._num_exact(i)], self.owners[i])
            for i, text in enumerate(texts)
        ]
        # Of equally long ones its own: nothing is copied.
        sources = [self._ended[b], *self._ended, *begun, *filter(None, [self.snapshot])]
        self._ended[b] = HeldRow(self._full, b, [])
        best = max(sources, key=lambda it: it.num_shared(texts[b], owner))
        if self.store is not None:
            best = self.store.longer(texts[b][: max(0, most)], owner, best)
        num_tokens = max(0, min(best.num_shared(texts[b], owner), most))
        if num_tokens:
            self._fill(b, best, num_tokens)
        self._full.restore(b, num_tokens)
        self.note_certain()
        return num_tokens

    def publish(self, b: int, tokens: list[int]) -> None:
        """The prompt of row b, of which these tokens are read, is there for other engines, too."""
        if self.store is not None and self.snapshot is None:  # who computed that is not known
            self.store.write(HeldRow(self._full, b, tokens, self.owners[b]))

    def _fill(self, b: int, source: HeldRow, num_tokens: int) -> None:
        """Copies K and V of the first tokens into row b, as far as they are not there."""
        is_there = (source.full, source.b) == (self._full, b)
        for layer, pair in enumerate(source.layers(num_tokens)):
            if not is_there:
                self._full.write(layer, b, *pair)
