"""The prefix cache: K and V of texts that have ended, reused by prompts that begin alike.

They stay in the rows of the full cache, whose lengths are 0 then. Padding of other rows' passes
overwrites the first slots of such a row, so a copy of those slots is saved when its text ends.

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
    """Finds shared prefixes in the rows of a full cache, a snapshot and a store."""

    def __init__(self, full: FullCache, num_guarded: int, *, reuses_generated: bool) -> None:
        """Passes of other rows write to `num_guarded` slots of a row without a text. Without
        `reuses_generated` no bit of a text changes: decoding may round otherwise than prefill."""
        self._full = full
        self._num_guarded = num_guarded
        self._reuses_generated = reuses_generated
        self._ended = [HeldRow(full, b, []) for b in range(len(full.lengths))]
        self._num_committed = list(full.lengths)
        self._num_prompt = [1] * len(full.lengths)  # tokens of each row's prompt
        self.owners = [""] * len(full.lengths)  # of each row's text, set before `take`
        self.snapshot: HeldRow | None = None
        self.store: Store | None = None

    def note_committed(self) -> None:
        """Marks all that the full cache holds as committed; a step may add guesses to it."""
        self._num_committed = list(self._full.lengths)

    def _num_exact(self, b: int) -> int:
        """Tokens of row b whose K and V may be reused."""
        held = self._num_committed[b]
        return held if self._reuses_generated else min(held, self._num_prompt[b] - 1)

    @property
    def longest(self) -> HeldRow | None:
        """The ended text with the most tokens."""
        row = max(self._ended, key=lambda row: len(row.tokens))
        return row if row.tokens else None

    def num_shared(self, prompt: list[int]) -> int:
        """Tokens of the prompt that the best row of an ended text shares."""
        return max(num_common(row.tokens, prompt) for row in self._ended)

    def keep(self, b: int, text: list[int]) -> None:
        """Keeps the text of row b, which ends; call before the row is reset."""
        if self._num_committed[b]:  # else the row still holds the text before
            self._guard(b, text[: self._num_exact(b)], self.owners[b])
            self._num_committed[b] = 0

    def _guard(self, b: int, tokens: list[int], owner: str | None) -> None:
        """Notes that row b holds these tokens; saves a copy of its first slots."""
        pair = self._full.tokens(b, 0, min(len(tokens), self._num_guarded))
        self._ended[b] = HeldRow(self._full, b, tokens, owner, torch.stack(pair, 1))

    def adopt(self, other: "PrefixCache") -> None:
        """Copies the texts of another cache, the longest first, as far as there is room."""
        longest_first = sorted(other._ended, key=lambda row: -len(row.tokens))
        for place, row in enumerate(longest_first[: len(self._ended)]):
            b = row.b if self._full is other._full else place
            tokens = row.tokens[: self._full.capacity]
            self._fill(b, row, len(tokens))
            self._guard(b, tokens, row.owner)

    def best_place(self, places: list[int], prompt: list[int], owner: str) -> int:
        """The free row for a prompt: where most is shared and the least other text is lost."""
        rows = [self._ended[b] for b in places]
        return max(rows, key=lambda row: 2 * row.num_shared(prompt, owner) - len(row.tokens)).b

    def take(self, b: int, texts: list[list[int]], most: int) -> int:
        """Fills row b, which is empty, with the longest cached prefix of its prompt, at most `most`
        tokens; returns how many. `texts` are those of all rows."""
        self._num_prompt[b] = len(texts[b])
        owner = self.owners[b]
        begun = [
            HeldRow(self._full, i, text[: self._num_exact(i)], self.owners[i])
            for i, text in enumerate(texts)
        ]
        # The row itself comes first: of equally long prefixes, its own needs no copy.
        sources = [self._ended[b], *self._ended, *begun]
        if self.snapshot is not None:
            sources.append(self.snapshot)
        self._ended[b] = HeldRow(self._full, b, [])
        best = max(sources, key=lambda row: row.num_shared(texts[b], owner))
        if self.store is not None:
            best = self.store.longer(texts[b][: max(0, most)], owner, best)
        num_tokens = max(0, min(best.num_shared(texts[b], owner), most))
        if num_tokens:
            self._fill(b, best, num_tokens)
        self._full.restore(b, num_tokens)
        self.note_committed()
        return num_tokens

    def publish(self, b: int, tokens: list[int]) -> None:
        """Stores these tokens of row b's prompt, which were read, for other engines."""
        if self.store is not None and self.snapshot is None:  # it may come from another device
            self.store.write(HeldRow(self._full, b, tokens, self.owners[b]))

    def _fill(self, b: int, source: HeldRow, num_tokens: int) -> None:
        """Copies K and V of the first tokens into row b, unless they are there already."""
        is_there = (source.full, source.b) == (self._full, b)
        for layer, pair in enumerate(source.layers(num_tokens)):
            if not is_there:
                self._full.write(layer, b, *pair)
