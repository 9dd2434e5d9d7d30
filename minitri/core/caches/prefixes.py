"""The prefix cache: K and V of texts, ended or in progress, for prompts that begin alike.

K and V of an ended text stay in a row of the full cache, whose length is then 0. Padding of other
rows' passes overwrites the row's first slots, so a copy of these is saved when the text ends.
Legend: L layers, P = 2 (K and V), B rows, T tokens, K KV heads, D head dim.
"""

from typing import Protocol

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.stats import Tokens, num_common


class Store(Protocol):
    """Interface of a store of prompts' K and V that engines share; see `files/kv_store.py`."""

    def longer(self, tokens: Tokens, owner: str, held: HeldRow) -> HeldRow:
        """K and V of the longest prefix of `tokens` stored for `owner`, or `held` if as long."""

    def write(self, source: HeldRow) -> None:
        """Queues the K and V of a prompt to be stored; does not wait for the write."""

    def close(self) -> None:
        """Closes the store after all queued prompts are written."""


class PrefixCache:
    """Finds K and V of a prompt's first tokens in rows of a cache, a snapshot file, a store."""

    def __init__(self, full: FullCache, num_guarded: int, *, reuses_generated: bool) -> None:
        """Saves the first `num_guarded` slots of ended texts: other rows' passes overwrite these.
        Without `reuses_generated` only prompts are reused, not K and V that decoding computed."""
        num_rows = len(full.lengths)
        self._full = full
        self._num_guarded = num_guarded
        self._reuses_generated = reuses_generated
        self._ended = [HeldRow(full, b, []) for b in range(num_rows)]
        self._num_prompt = [1] * num_rows  # tokens of each row's prompt
        self.owners = [""] * num_rows  # of each row's text, set before `take`
        self.snapshot: HeldRow | None = None
        self.store: Store | None = None

    def _reusable(self, b: int, text: Tokens) -> Tokens:
        """The first tokens of row b's committed text whose K and V are held and may be reused."""
        # The cache may hold guesses, too; the text's last token is read in the next pass.
        most = len(text) if self._reuses_generated else self._num_prompt[b]
        return text[: min(self._full.lengths[b], most - 1)]

    @property
    def longest(self) -> HeldRow | None:
        row = max(self._ended, key=lambda row: len(row.tokens))
        return row if row.tokens else None

    def num_shared(self, prompt: Tokens) -> int:
        """Largest number of first tokens that the prompt shares with an ended text."""
        return max(num_common(row.tokens, prompt) for row in self._ended)

    def keep(self, b: int, text: Tokens) -> None:
        """Keeps K and V of row b, whose text ends; called before the row is reset."""
        if self._full.lengths[b]:  # else nothing was read, and the row holds an earlier text
            self._guard(b, self._reusable(b, text), self.owners[b])

    def _guard(self, b: int, tokens: Tokens, owner: str | None) -> None:
        """Records that ended row b holds these tokens of `owner`; copies its first slots."""
        pair = self._full.tokens(b, 0, min(len(tokens), self._num_guarded))
        self._ended[b] = HeldRow(self._full, b, tokens, owner, torch.stack(pair, 1))

    def adopt(self, other: "PrefixCache") -> None:
        """Copies another prefix cache's ended texts, with K and V, to rows here, longest first."""
        longest_first = sorted(other._ended, key=lambda row: -len(row.tokens))
        for place, row in enumerate(longest_first[: len(self._ended)]):
            b = row.b if self._full is other._full else place
            tokens = row.tokens[: self._full.capacity]
            self._fill(b, row, len(tokens))
            self._guard(b, tokens, row.owner)

    def best_row(self, free_rows: list[int], prompt: Tokens, owner: str) -> int:
        """The free row with most tokens of `owner`'s prompt, minus others, which would be lost."""
        rows = [self._ended[b] for b in free_rows]
        return max(rows, key=lambda row: 2 * row.num_shared(prompt, owner) - len(row.tokens)).b

    def take(self, b: int, texts: list[Tokens], most: int) -> int:
        """Fills the empty row b with K and V of the longest held prefix of its prompt `texts[b]`.
        Returns its number of tokens, at most `most`. `texts` are the texts of all rows."""
        prompt = texts[b]
        self._num_prompt[b] = len(prompt)
        owner = self.owners[b]
        begun = [
            HeldRow(self._full, i, self._reusable(i, text), self.owners[i])
            for i, text in enumerate(texts)
        ]
        # The row itself comes first: of equally long prefixes, its own needs no copy.
        sources = [self._ended[b], *self._ended, *begun]
        if self.snapshot:
            sources.append(self.snapshot)
        self._ended[b] = HeldRow(self._full, b, [])
        best = max(sources, key=lambda row: row.num_shared(prompt, owner))
        if self.store:
            best = self.store.longer(prompt[:most], owner, best)
        num_tokens = min(best.num_shared(prompt, owner), most)
        if num_tokens:
            self._fill(b, best, num_tokens)
        self._full.restore(b, num_tokens)
        return num_tokens

    def publish(self, b: int, tokens: Tokens) -> None:
        """Queues K, V of row b's prompt `tokens` for the store, unless a snapshot file is used."""
        if self.store and not self.snapshot:  # which another device may have computed
            self.store.write(HeldRow(self._full, b, tokens, self.owners[b]))

    def _fill(self, b: int, source: HeldRow, num_tokens: int) -> None:
        """Copies K and V of `source`'s first `num_tokens` to row b, unless `source` is that row."""
        for layer, pair in enumerate(source.layers(num_tokens)):
            if (source.full, source.b) != (self._full, b):
                self._full.write(layer, b, *pair)
