"""The retrieval cache: the part of the target's KV cache that matters now (TriForce, section 4.1).

Per layer and KV head a row holds `budget` tokens of the full cache, chosen by a policy, and then
the block that is being guessed. Slots are ordered from the least important to the most; exact K and
V of committed tokens overwrite the least important slots, so output can be of any length. A row
represents the first `num_tokens[b]` tokens of the text; `lengths[b]` of them have slots, the others
are left out.

A row in use is rebuilt when half of it is overwritten, and after `rebuild_stride` tokens. Chunks
are scored for queries of the latest tokens (an observation window, as in SnapKV), of which the
target's verification pass has just computed the last: a rebuild needs no pass of its own. If the
full cache is in host memory, `select` rebuilds layer by layer. Layers with a sliding window have no
budget: they hold the window, see `attention.py`.

Legend: L layers, B batch, S slots, K KV heads, H query heads, D head dim, T tokens, N chunks, C
chunks that are kept, M tokens of a chunk, W observation window, R = W H / K.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import ChunkRetrieval, Policy
from minitri.core.errors import explain
from minitri.core.model.block import empty_queries
from minitri.core.model.cache import Cache, plain_slots
from minitri.core.model.llama import Llama
from minitri.core.settings import SpeculationConfig, pad_to_stride


@dataclass
class RetrievedRow:
    """State of one row of a `RetrievalCache`; all counts are in tokens, one per slot."""

    budget: int  # slots for tokens of the full cache
    num_overwritten: int
    """Slots, from slot 0 on, that new tokens have overwritten since the last build. Before the
    first build it counts the sinks too, so that these stay in the first slots."""
    num_committed: int = 0  # tokens of the text copied here, or left out by a build
    built_at: float = -math.inf  # length of the text at the last build
    is_selected: bool = False  # whether chunks were selected in the target's latest pass


class RetrievalCache(Cache):
    """KV cache of `budget` relevant tokens of each row of a full cache, and of new tokens."""

    def __init__(
        self, full: FullCache, model: Llama, speculation: SpeculationConfig, budgets: list[int]
    ) -> None:
        """An empty cache for `budgets[b]` tokens of each row b of `full`, the cache of `model`."""
        L = model.config.num_layers
        _, B, K, _, D = full.keys.shape
        self._full = full
        self._is_custom = speculation.policy != "retrieval"
        custom = copy.deepcopy(speculation.policy)
        self._policy: Policy = custom if self._is_custom else ChunkRetrieval()
        self._settings = speculation
        self._reading = model.execution.reading
        window = speculation.observation_window
        self.max_prompt_queries = None if getattr(custom, "wants_prompt", False) else window
        """Number of last tokens of a prompt chunk whose queries `observe` needs; None: all."""
        self._window = min(model.config.window, full.capacity)
        self._windowed = model.config.sliding_layers if self._window else ()
        plain = [layer for layer in range(L) if layer not in self._windowed]
        self._plain = plain if self._window else slice(None)
        slots = pad_to_stride(max(*budgets, self._window) + speculation.room)
        make_slots = model.execution.make_slots or plain_slots
        super().__init__(*make_slots((L, B, K, slots, D), model.dtype, model.device))
        self.queries_LBTHD = empty_queries(model, B, speculation.max_block)
        """Rotated queries of the latest block of the target, whose passes write them."""
        # Queries of each row's latest tokens, in pieces (L, T, H, D): the last W tokens count.
        self._queries: list[list[Tensor]] = [[] for _ in budgets]
        self.rows = [RetrievedRow(budget, speculation.num_sink_tokens) for budget in budgets]
        self.is_wanted = True
        """Whether rows are built: a run that does not guess with them saves the time."""

    def reset(self, b: int, budget: int | None = None) -> None:
        super().reset(b)
        budget = budget or self.rows[b].budget
        self.rows[b] = RetrievedRow(budget, self._settings.num_sink_tokens)
        self._queries[b] = []
        with self._asking():
            self._policy.reset(b)

    def observe(self, b: int, queries_LTHD: Tensor) -> None:
        """Keeps rotated queries of row b's T new tokens, by which the next chunks are selected."""
        W = self._settings.observation_window
        earlier = self._queries[b] if queries_LTHD.shape[1] < W else []
        self._queries[b] = [*earlier, queries_LTHD[:, -W:].clone()][-W:]
        with self._asking():
            self._policy.observe(self._full, b, queries_LTHD, self._full.lengths[b])

    def _asking(self) -> AbstractContextManager[None]:
        """Context for calls of the policy: errors of a user's own policy become `InputError`s."""
        problem = f"the policy {type(self._policy).__name__} failed"
        return explain(problem, "correct it") if self._is_custom else nullcontext()

    def select(self, layer: int, keys_BKSD: Tensor, values_BKSD: Tensor) -> None:
        """Refills a layer of rows due for a rebuild, with chunks of the full cache's K and V.
        Called by an offloaded full cache's `update`."""
        for b, (row, end) in enumerate(zip(self.rows, self._full.lengths, strict=True)):
            if layer == 0:
                row.is_selected = self._is_due(row, end)
            if row.is_selected:
                query_HD = self.queries_LBTHD[layer, b, 0]
                self._select(layer, b, end, query_HD, keys_BKSD[b], values_BKSD[b])

    def commit(self, b: int, queries_LTHD: Tensor) -> bool:
        """Updates row b by T tokens that the target read and kept; returns whether it was rebuilt.
        The queries are the rotated ones of these tokens; `take_committed` copies their K and V."""
        row = self.rows[b]
        self.crop_row(b, row.num_committed)  # drops all guesses, the accepted ones too
        known = self._full.lengths[b] - queries_LTHD.shape[1]  # tokens before the target's pass
        if not row.is_selected and self._is_due(row, known):
            row.is_selected = True
            with self._reading():  # on all CPU threads
                for layer, pair in enumerate(self._full.layers(b)):
                    self._select(layer, b, known, queries_LTHD[layer, 0], *pair)
        if row.is_selected:
            self._copy_window(b)
            M = self._settings.chunk_size
            num_whole = known // M * M  # `take_committed` copies the tokens after the whole chunks
            self.rows[b] = RetrievedRow(row.budget, 0, num_committed=num_whole, built_at=known)
            self.hold(b, row.budget, num_whole)
        self.observe(b, queries_LTHD)
        return row.is_selected

    def take_committed(self, active: Sequence[bool]) -> None:
        for b, is_active in enumerate(active):
            if is_active:
                self._copy_window(b)
                self._copy_committed(b)

    def keep_path(self, b: int, path: list[int]) -> None:
        if not self._window:
            super().keep_path(b, path)
            return
        froms, tos = torch.tensor([path, [*range(1, len(path) + 1)]]).to(self.device)
        for layer in range(len(self.keys)):
            start = (self.num_tokens if layer in self._windowed else self.lengths)[b]
            for slots in (self.keys[layer, b], self.values[layer, b]):
                slots[:, (start + tos) % self.capacity] = slots[:, (start + froms) % self.capacity]

    def of_rows(self, rows: slice) -> Self:
        part = super().of_rows(rows)
        part.rows = self.rows[rows]
        part._full = self._full.of_rows(rows)
        return part

    def _is_due(self, row: RetrievedRow, num_tokens: int) -> bool:
        """Whether to rebuild the row, from the first `num_tokens` tokens of the text."""
        is_old = num_tokens - row.built_at >= self._settings.rebuild_stride
        is_worn = row.num_overwritten >= row.budget / 2
        is_used = row.num_committed > row.built_at  # never built, or used since
        is_needed = self.is_wanted and is_used and num_tokens > row.budget
        return is_needed and (is_old or is_worn)

    def _select(
        self, layer: int, b: int, end: int, query_HD: Tensor, keys_KSD: Tensor, values_KSD: Tensor
    ) -> None:
        """Fills row b's slots of a layer with the best chunks of its first `end` tokens, best last.
        The policy scores by the latest queries and `query_HD`; sinks and recent chunks stay."""
        if layer in self._windowed:
            return
        M = self._settings.chunk_size
        K = self.keys.shape[2]
        N, C = end // M, self.rows[b].budget // M
        recent = min(-(-self._settings.num_recent_tokens // M), max(1, C // 4))
        sinks = min(-(-self._settings.num_sink_tokens // M), C - recent)
        W = self._settings.observation_window
        pieces = [queries_LTHD[layer] for queries_LTHD in self._queries[b]]
        queries_WHD = torch.cat((*pieces, query_HD.unsqueeze(0)))[-W:]
        q_KRD = queries_WHD.unflatten(1, (K, -1)).transpose(0, 1).flatten(1, 2)
        keys_KNMD = keys_KSD[:, : N * M].unflatten(1, (N, M))
        with self._asking():
            scores_KN = self._policy.scores(layer, b, q_KRD, keys_KNMD)
            if self._is_custom and (scores_KN.shape != (K, N) or scores_KN.isnan().any()):
                raise ValueError(f"give numbers of shape {[K, N]}")
        scores_KN = scores_KN.to(q_KRD.device, torch.float32, copy=True)
        scores_KN[:, :sinks] = scores_KN[:, N - recent :] = math.inf
        chosen_KC = scores_KN.topk(C).indices.flip(1)
        heads_K1 = torch.arange(K, device=keys_KSD.device).unsqueeze(1)
        tokens_M = torch.arange(M, device=keys_KSD.device)
        places_KT = (chosen_KC.unsqueeze(2) * M + tokens_M).flatten(1)
        for small, slots_KSD in ((self.keys, keys_KSD), (self.values, values_KSD)):
            small[layer, b, :, : C * M] = slots_KSD[heads_K1, places_KT]

    def _copy_committed(self, b: int) -> None:
        """Copies row b's new K and V of the full cache to free slots, or the least important."""
        row, end = self.rows[b], self._full.lengths[b]
        while (start := row.num_committed) < end:
            used = self.lengths[b]
            is_free = used < row.budget
            slot = used if is_free else row.num_overwritten % row.budget
            count = min(end - start, row.budget - slot)
            exact = self._full.tokens(b, start, start + count)
            for small, exact_LKTD in zip((self.keys, self.values), exact, strict=True):
                small[self._plain, b, :, slot : slot + count] = exact_LKTD[self._plain]
            row.num_overwritten += 0 if is_free else count
            row.num_committed += count
            self.hold(b, min(used + count, row.budget), row.num_committed)

    def _copy_window(self, b: int) -> None:
        """Copies row b's new K and V of the full cache to layers with a sliding window, if any."""
        end = self._full.lengths[b]
        start = max(self.rows[b].num_committed, end - self._window)
        if start == end:
            return
        slots_T = torch.arange(start, end, device=self.device) % self.capacity
        exact = self._full.tokens(b, start, end)
        for small, exact_LKTD in zip((self.keys, self.values), exact, strict=True):
            for layer in self._windowed:
                small[layer, b][:, slots_T] = exact_LKTD[layer]
