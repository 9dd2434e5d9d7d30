"""The retrieval cache: the part of the target's KV cache that matters now (TriForce, section 4.1).

Per layer and KV head it holds `budget` tokens of the full cache, chosen by a policy, and behind them the block that is
being guessed. Slots are ordered from the least important to the most, so the exact K and V of tokens that have been
committed overwrite the least important ones, one slot after the other, and from one choice to the next the prefix has
the same length.

The cache is chosen anew when half of it has been overwritten, at a stride, when the target rejects too much, or when
another budget is wanted. This belongs to a pass in which the target verifies: it is due or not before that pass,
chooses among the tokens committed by then, and asks with the queries of the latest of them (an observation window, as
in SnapKV), that with which the pass begins included. So it costs no pass of its own: where the full cache is in host
memory, `visit` chooses of every layer while it is on the device, and `commit` finds it done; else `commit` does it.
Output can be of any length.

While a text is no longer than the budget the cache simply holds all of it, and equals the full cache.

Keys are rotated at absolute positions, hence the order of slots means nothing to attention.

Legend: L layers, B batch, T tokens, S slots, K KV heads, H query heads, D head dim, M unit size, C units kept,
W = observation window, R = H / K times the tokens in it.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from minitri.model.attention import whole_strides
from minitri.model.cache import write_block
from minitri.caches.full import FullCache
from minitri.caches.policies import Policy
from minitri.settings import SpeculationConfig

MEMORY = 0.9
"""Weight of the past in the moving acceptance rate that `rebuild_threshold` is compared with."""


class RetrievalCache:
    """A small copy of a full cache: `budget` committed tokens per row, and room for a block behind them."""

    def __init__(
        self,
        full: FullCache,
        policy: Policy,
        speculation: SpeculationConfig,
        *,
        budgets: list[int],
        num_heads: int,
        max_budget: int = 0,
    ) -> None:
        """Empty; `commit` fills it. There is room for the larger of `budgets` and `max_budget`."""
        L, B, K, _, D = full.shape
        self._whole = -(-full.capacity // policy.unit) * policy.unit  # no row can ever fill more
        self._full = full
        self._policy = policy
        self._settings = speculation
        self._most = min(max(*budgets, max_budget), self._whole)
        shape = (L, B, K, whole_strides(self._most + speculation.room), D)
        self.keys, self.values = (
            torch.empty(shape, dtype=full.dtype, device=full.device) for _ in range(2)
        )
        window = (L, B, speculation.observation_window, num_heads, D)
        self._queries = torch.empty(
            window, dtype=full.dtype, device=full.device
        )  # in turns, the oldest goes
        self.restart(budgets)

    def restart(self, budgets: list[int]) -> None:
        """Empties it for other texts."""
        B = len(budgets)
        self.budgets = [min(budget, self._whole) for budget in budgets]
        self._wanted = list(self.budgets)  # when it is chosen next
        self.num_rebuilds = 0
        self.rebuild_seconds = 0.0
        self._num_queries = [0] * B  # that have been seen
        self._num_committed = [0] * B
        self._num_held = [0] * B  # committed tokens in slots; the budget, once the text is longer
        self._num_guessed = [0] * B  # block tokens behind them
        self._num_overwritten = [0] * B  # slots, since the cache was last chosen
        self._num_since_build = [0] * B
        self._moving_rate = [1.0] * B
        self._is_chosen = [
            False
        ] * B  # else the text is here in its order, but for where it has outgrown the budget
        self._num_visited = [0] * B  # tokens among which the last visit chose
        for b in range(B):
            self._start_over(b)
        self._policy.forget()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def holds(self, budget: int) -> bool:
        """Whether there is room for such a budget."""
        return min(budget, self._whole) <= self._most

    @property
    def max_prompt_queries(self) -> int | None:
        """Of how many of its last tokens `observe` needs the queries when a prompt is read; None: of all."""
        return None if self._policy.wants_prompt else self._queries.shape[2]

    @property
    def lengths(self) -> list[int]:
        return [
            held + guessed for held, guessed in zip(self._num_held, self._num_guessed, strict=True)
        ]

    @property
    def num_tokens(self) -> list[int]:
        return [sum(pair) for pair in zip(self._num_committed, self._num_guessed, strict=True)]

    @property
    def next_positions(self) -> list[int]:
        return self.num_tokens

    def update(
        self,
        layer: int,
        raw_BTKD: Tensor,  # noqa: ARG002
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        slots_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return write_block(
            self.keys[layer], self.values[layer], k_BTKD, v_BTKD, self.lengths, slots_BT
        )

    def advance(self, counts: list[int]) -> None:
        self._num_guessed = [
            guessed + count for guessed, count in zip(self._num_guessed, counts, strict=True)
        ]

    def crop(self, num_tokens: list[int]) -> None:
        for b, wanted in enumerate(num_tokens):
            if (
                wanted == 0 and self._num_committed[b]
            ):  # else it only observes so far, and is to keep that
                self._start_over(b)
            self._num_guessed[b] = wanted - self._num_committed[b]
            assert self._num_guessed[b] >= 0

    def resize(self, budgets: list[int]) -> None:
        """Wants other budgets. A row has its own when it is chosen anew, in the next pass of the target, or as soon as
        its text is longer than both."""
        self._wanted = [min(budget, self._whole) for budget in budgets]

    def observe(self, b: int, queries_LTHD: Tensor) -> None:
        """Learns that the full cache of row b has grown; the queries are those of its last T tokens."""
        T, W = queries_LTHD.shape[1], self._queries.shape[2]
        seen = self._num_queries[b]
        places = torch.arange(seen + max(T - W, 0), seen + T, device=self._queries.device) % W
        self._queries[:, b, places] = queries_LTHD[:, -W:]
        self._num_queries[b] = seen + T
        self._policy.observe(self._full, b, queries_LTHD, self._full.lengths[b])

    def visit(
        self, queries_LBTHD: Tensor, layer: int, keys_BKSD: Tensor, values_BKSD: Tensor
    ) -> None:
        """Chooses what is due of a layer, in a pass of the target. The queries are those of its block; K and V stand
        where they do in the full cache."""
        for b, end in enumerate(self._full.lengths):
            if self._is_due(b, end):
                self._choose(
                    layer,
                    b,
                    queries_LBTHD[layer, b, 0],
                    keys_BKSD[b, :, :end],
                    values_BKSD[b, :, :end],
                )
                self._num_visited[b] = end

    def commit(
        self, b: int, queries_LTHD: Tensor, *, was_rejected: bool, has_guessed: bool = True
    ) -> None:
        """Takes over what the full cache now holds of row b, and drops the block.

        The queries are those of the T latest tokens of the full cache, T at least 1, which `observe` has not seen and
        a pass of the target has just read; `was_rejected` says whether it has rejected a guess, `has_guessed` whether
        guesses were made with this cache.
        """
        end = self._full.lengths[b]
        known = end - queries_LTHD.shape[1]  # before that pass
        num_tested = end - known - 1 + was_rejected
        if self._is_due(b, known):
            if self._num_visited[b] != known:
                started = time.perf_counter()
                for layer, (keys_KSD, values_KSD) in enumerate(self._full.layers(b)):
                    self._choose(
                        layer, b, queries_LTHD[layer, 0], keys_KSD[:, :known], values_KSD[:, :known]
                    )
                self.rebuild_seconds += time.perf_counter() - started
            self.num_rebuilds += 1
            self._is_chosen[b] = True
            self.budgets[b] = self._next_budget(b, known)
            self._num_held[b], self._num_overwritten[b] = self.budgets[b], 0
            self._num_since_build[b], self._moving_rate[b] = 0, 1.0
            self._num_committed[b] = (
                known // self._policy.unit * self._policy.unit
            )  # what is left of the last unit
        elif num_tested and has_guessed:
            rate = (end - known - 1) / num_tested
            self._moving_rate[b] = MEMORY * self._moving_rate[b] + (1 - MEMORY) * rate
        self._num_since_build[b] += end - known
        self._num_guessed[b] = 0
        self._take(b, self._num_committed[b], end)
        self._num_committed[b] = end
        self.observe(b, queries_LTHD)

    def _is_due(self, b: int, num_tokens: int) -> bool:
        """Whether a pass that begins behind so many tokens is the time to choose."""
        return num_tokens > self.budgets[b] and (
            not self._is_chosen[b]
            or self._next_budget(b, num_tokens) != self.budgets[b]
            or self._num_overwritten[b] >= self.budgets[b] / 2
            or self._num_since_build[b] >= self._settings.rebuild_stride
            or self._moving_rate[b] < self._settings.rebuild_threshold
        )

    def _next_budget(self, b: int, num_tokens: int) -> int:
        return self._wanted[b] if num_tokens > self._wanted[b] else self.budgets[b]

    def _choose(
        self, layer: int, b: int, query_HD: Tensor, keys_KSD: Tensor, values_KSD: Tensor
    ) -> None:
        """Fills the slots of a layer for a new query and those that have been observed, which it joins."""
        M, K, W = self._policy.unit, self.keys.shape[2], self._queries.shape[2]
        num_units, C = keys_KSD.shape[1] // M, self._next_budget(b, keys_KSD.shape[1]) // M
        recent = min(-(-self._settings.num_recent_tokens // M), max(1, C // 4))
        sinks = min(-(-self._settings.num_sink_tokens // M), C - recent)
        self._queries[layer, b, self._num_queries[b] % W] = query_HD
        queries_WHD = self._queries[layer, b, : self._num_queries[b] + 1]
        q_KRD = queries_WHD.unflatten(1, (K, -1)).transpose(0, 1).flatten(1, 2)
        scores_KN = self._policy.scores(layer, b, q_KRD, keys_KSD).clone()
        scores_KN[:, :sinks] = scores_KN[:, num_units - recent :] = math.inf
        chosen_KC = scores_KN.topk(C).indices.flip(1)
        heads_K1 = torch.arange(K, device=chosen_KC.device).unsqueeze(1)
        for small, large_KSD in ((self.keys, keys_KSD), (self.values, values_KSD)):
            units = large_KSD[:, : num_units * M].unflatten(1, (num_units, M))  # (K, N, M, D)
            small[layer, b, :, : C * M] = units[heads_K1, chosen_KC].flatten(1, 2)

    def _take(self, b: int, start: int, end: int) -> None:
        """Exact K and V of the full cache's tokens from `start` to `end`: into free slots, then over the least
        important ones."""
        budget = self.budgets[b]
        while start < end:
            is_free = self._num_held[b] < budget
            slot = self._num_held[b] if is_free else self._num_overwritten[b] % budget
            stop = min(end, start + budget - slot)
            for small, exact in zip(
                (self.keys, self.values), self._full.tokens(b, start, stop), strict=True
            ):
                small[:, b, :, slot : slot + stop - start] = exact
            if is_free:
                self._num_held[b] += stop - start
            else:
                self._num_overwritten[b] += stop - start
            start = stop

    def _start_over(self, b: int) -> None:
        self._num_committed[b] = self._num_held[b] = self._num_queries[b] = self._num_since_build[
            b
        ] = 0
        self._num_overwritten[b] = (
            self._settings.num_sink_tokens
        )  # the sinks stay until it is chosen
        self._moving_rate[b] = 1.0
        self._is_chosen[b] = False
        self._num_visited[b] = 0
