"""The retrieval cache: the part of the target's KV cache that matters now (TriForce, section 4.1).

Per layer and KV head it holds `budget` tokens of the full cache, chosen by a policy, and after them
the block that is being guessed. Slots are ordered from the least important to the most; exact K and
V of tokens that have been committed overwrite the least important ones. So the prefix has the same
length from one rebuild to the next, and output can be of any length. While a text is no longer than
the budget the cache holds all of it, and equals the full cache.

It is rebuilt when half of it has been overwritten, at a stride, or when the target rejects too
much. A rebuild belongs to a pass of the target: it is due or not before that pass, selects among
the tokens committed by then, and asks with the queries of the latest of them (an observation
window, as in SnapKV), the first token of that pass included. So it costs no pass of its own, and
takes three steps: it is planned, selects from every layer, and is finished by `commit`. Where the
full cache is on the device `commit` takes all three; where it is in host memory, the first two are
taken in the pass, while each layer is on the device.

Legend: L layers, B batch, T tokens, S slots, K KV heads, H query heads, D head dim, M tokens of a
chunk, N chunks, C of them kept, W observation window, R = H / K times the tokens in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.policies import Policy
from minitri.model.cache import BlockKV, gather_path, round_up_to_stride, write_block
from minitri.settings import SpeculationConfig

MEMORY = 0.9
"""Weight of the past in the moving acceptance rate that `rebuild_threshold` is compared with."""


@dataclass
class Row:
    """The state of one sequence; all counts are tokens, which here are slots."""

    budget: int
    num_overwritten: int
    """Slots overwritten since the last build. Begins with the sinks, which stay until the first."""
    num_committed: int = 0
    """Tokens of the text that this cache stands for."""
    num_held: int = 0
    """Committed tokens in slots; the budget, once the text is longer."""
    num_guessed: int = 0
    """Tokens of the block after them."""
    num_queries: int = 0
    """Tokens whose queries have been observed."""
    num_since_build: int = 0
    """Tokens committed since the last build."""
    acceptance: float = 1.0
    """Moving acceptance rate of what was guessed with this cache."""
    is_built: bool = False
    """False: the text is here in its order, except where it has outgrown the budget."""
    is_planned: bool = False
    """Whether it is rebuilt with the latest pass of the target."""


class RetrievalCache:
    """A small copy of a full cache: `budget` committed tokens per row, room for a block after."""

    selects_in_pass = False
    """Whether each pass of the target plans rebuilds and selects; else `commit` does."""

    def __init__(
        self,
        full: FullCache,
        policy: Policy,
        speculation: SpeculationConfig,
        *,
        budgets: list[int],
        num_heads: int,
    ) -> None:
        """Empty; `commit` fills it."""
        L, B, K, _, D = full.shape
        self._full = full
        self._policy = policy
        self._settings = speculation
        self.max_budget = max(budgets)
        slots = round_up_to_stride(self.max_budget + speculation.room)
        empty = full.keys.new_empty
        self.keys, self.values = empty(L, B, K, slots, D), empty(L, B, K, slots, D)
        # Of the tokens in the observation window; a ring buffer.
        self._queries = empty(L, B, speculation.observation_window, num_heads, D)
        self.restart(budgets)

    def restart(self, budgets: list[int]) -> None:
        """Empties all rows, for other texts with these budgets; none may exceed `max_budget`."""
        assert max(budgets) <= self.max_budget
        self.rows = [Row(budget, self._settings.num_sink_tokens) for budget in budgets]
        self.num_rebuilds = 0
        for b in range(len(budgets)):
            self._policy.reset(b)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def max_prompt_queries(self) -> int | None:
        """Last tokens of a chunk of the prompt whose queries `observe` needs; None: all."""
        return None if self._policy.wants_prompt else self._queries.shape[2]

    @property
    def lengths(self) -> list[int]:
        """Valid slots per row."""
        return [row.num_held + row.num_guessed for row in self.rows]

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's text that have been read."""
        return [row.num_committed + row.num_guessed for row in self.rows]

    next_positions = num_tokens

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        return write_block(self.keys[layer], self.values[layer], block, self.lengths)

    def advance(self, counts: list[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            row.num_guessed += count

    def crop(self, num_tokens: list[int]) -> None:
        for row, wanted in zip(self.rows, num_tokens, strict=True):
            row.num_guessed = wanted - row.num_committed
            assert row.num_guessed >= 0

    def keep_path(self, b: int, path: list[int]) -> None:
        for slots in (self.keys, self.values):
            gather_path(slots, b, self.lengths[b], path)

    def reset(self, b: int, budget: int | None = None, num_tokens: int = 0) -> None:
        """Empties row b, for another text, with another budget if one is given, whose first
        `num_tokens` the full cache holds already."""
        budget = self.rows[b].budget if budget is None else budget
        assert budget <= self.max_budget
        self.rows[b] = Row(budget, self._settings.num_sink_tokens, num_queries=num_tokens)
        self._policy.reset(b)

    def observe(self, b: int, queries_LTHD: Tensor) -> None:
        """Learns that the full cache of row b has grown; the queries are of its last T tokens."""
        T, W = queries_LTHD.shape[1], self._queries.shape[2]
        seen = self.rows[b].num_queries
        places = torch.arange(seen + max(T - W, 0), seen + T, device=self._queries.device) % W
        self._queries[:, b, places] = queries_LTHD[:, -W:]
        self.rows[b].num_queries = seen + T
        self._policy.observe(self._full, b, queries_LTHD, self._full.lengths[b])

    def plan_rebuild(self) -> None:
        """Decides which rows are rebuilt with the pass of the target that begins now."""
        for row, num_tokens in zip(self.rows, self._full.lengths, strict=True):
            row.is_planned = self._is_due(row, num_tokens)

    def select(
        self, layer: int, queries_BHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor
    ) -> None:
        """Selects, for the rows that are planned, from one layer of the full cache that is on the
        device; the queries are those of the first token of the pass under way."""
        for b, end in enumerate(self._full.lengths):
            if self.rows[b].is_planned:
                prefix = keys_BKSD[b, :, :end], values_BKSD[b, :, :end]
                self._select(layer, b, queries_BHD[b], *prefix)

    def commit(
        self, b: int, queries_LTHD: Tensor, *, was_rejected: bool, has_guessed: bool = True
    ) -> None:
        """Takes over what the full cache now holds of row b, and drops the block.

        The queries are those of the T latest tokens in the full cache, T at least 1, which a pass
        of the target has just read and `observe` has not seen. `was_rejected`: that pass rejected a
        guess. `has_guessed`: its guesses were made with this cache.
        """
        row = self.rows[b]
        end = self._full.lengths[b]
        known = end - queries_LTHD.shape[1]  # before that pass
        num_accepted = end - known - 1
        num_tested = num_accepted + was_rejected
        if not self.selects_in_pass and self._is_due(row, known):
            row.is_planned = True
            for layer, (keys_KSD, values_KSD) in enumerate(self._full.layers(b)):
                prefix = keys_KSD[:, :known], values_KSD[:, :known]
                self._select(layer, b, queries_LTHD[layer, 0], *prefix)
        if row.is_planned:
            self.finish(b, known)
        elif num_tested and has_guessed:
            rate = num_accepted / num_tested
            row.acceptance = MEMORY * row.acceptance + (1 - MEMORY) * rate
        row.num_since_build += end - known
        row.num_guessed = 0
        self._copy_committed(b, row.num_committed, end)
        row.num_committed = end
        self.observe(b, queries_LTHD)

    def _is_due(self, row: Row, num_tokens: int) -> bool:
        """Whether a rebuild belongs to a pass of the target that begins after these tokens."""
        return num_tokens > row.budget and (
            not row.is_built
            or row.num_overwritten >= row.budget / 2
            or row.num_since_build >= self._settings.rebuild_stride
            or row.acceptance < self._settings.rebuild_threshold
        )

    def finish(self, b: int, known: int) -> None:
        """Row b now holds what was selected for all layers among the first `known` tokens."""
        row = self.rows[b]
        M = self._settings.chunk_size
        self.num_rebuilds += 1
        row.is_built, row.is_planned = True, False
        row.num_held, row.num_overwritten = row.budget, 0
        row.num_since_build, row.acceptance = 0, 1.0
        row.num_committed = known // M * M  # what is left of the last chunk is copied by `commit`

    def _select(
        self, layer: int, b: int, query_HD: Tensor, keys_KSD: Tensor, values_KSD: Tensor
    ) -> None:
        """Fills the slots of a layer with the best chunks of the full cache, best last; sinks and
        recent tokens are always kept. `query_HD` joins the observed queries."""
        M = self._settings.chunk_size
        K = self.keys.shape[2]
        W = self._queries.shape[2]
        N, C = keys_KSD.shape[1] // M, self.rows[b].budget // M
        recent = min(-(-self._settings.num_recent_tokens // M), max(1, C // 4))
        sinks = min(-(-self._settings.num_sink_tokens // M), C - recent)
        num_queries = self.rows[b].num_queries
        self._queries[layer, b, num_queries % W] = query_HD
        queries_WHD = self._queries[layer, b, : num_queries + 1]
        q_KRD = queries_WHD.unflatten(1, (K, -1)).transpose(0, 1).flatten(1, 2)
        keys_KNMD, values_KNMD = (
            slots_KSD[:, : N * M].unflatten(1, (N, M)) for slots_KSD in (keys_KSD, values_KSD)
        )
        scores_KN = self._policy.scores(layer, b, q_KRD, keys_KNMD).clone()
        scores_KN[:, :sinks] = scores_KN[:, N - recent :] = math.inf
        chosen_KC = scores_KN.topk(C).indices.flip(1)
        for small, chunks_KNMD in ((self.keys, keys_KNMD), (self.values, values_KNMD)):
            for k, chosen_C in enumerate(chosen_KC):  # ten times as fast as all heads at once
                best_CX = chunks_KNMD[k].flatten(1).index_select(0, chosen_C)
                small[layer, b, k, : C * M] = best_CX.view(C * M, -1)

    def _copy_committed(self, b: int, start: int, end: int) -> None:
        """Copies exact K and V of the text's tokens from `start` to `end` out of the full cache.

        Into free slots first, then over the least important ones.
        """
        row = self.rows[b]
        while start < end:
            is_free = row.num_held < row.budget
            slot = row.num_held if is_free else row.num_overwritten % row.budget
            stop = min(end, start + row.budget - slot)
            exact = self._full.tokens(b, start, stop)
            for small, exact_LKTD in zip((self.keys, self.values), exact, strict=True):
                small[:, b, :, slot : slot + stop - start] = exact_LKTD
            if is_free:
                row.num_held += stop - start
            else:
                row.num_overwritten += stop - start
            start = stop
