"""From settings to a working cascade: which stages there are, with which model and cache.

Knows every part and decides nothing while tokens are made, but for one thing: `Commit`, the one place in which all
caches take over what a step has made certain.

Legend: L layers, B batch, T tokens of a block, H query heads, D head dim.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.policies import Policy, make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.cascade import Cascade, Emitted, Level, Stage
from minitri.coins import CoupledCoins, IndependentCoins
from minitri.drafters.model import DraftReader
from minitri.drafters.ngram import NgramDrafter
from minitri.model import Llama
from minitri.reader import Reader
from minitri.settings import SamplingParams, SpeculationConfig
from minitri.stats import LevelStats, Stats


class Commit:
    """After every step: the small caches take over the exact K and V of the tokens that the last level let stand."""

    def __init__(
        self,
        sequences: list[list[int]],
        queries_LBTHD: Tensor,
        stats: Stats,
        retrieval: RetrievalCache | None,
        drafter: DraftReader | NgramDrafter | None,
    ) -> None:
        self._sequences = sequences
        self._queries_LBTHD = queries_LBTHD
        self._stats = stats
        self._retrieval = retrieval
        self._drafter = drafter

    def __call__(self, emitted: list[Emitted], active: list[bool]) -> None:
        started = time.perf_counter()
        before = self._retrieval.rebuild_seconds if self._retrieval else 0.0
        if self._retrieval:
            for b, row in enumerate(emitted):
                if active[b]:
                    # The block was the token before, and the guesses; its first len(row.tokens) inputs stay.
                    queries_LTHD = self._queries_LBTHD[:, b, : len(row.tokens)]
                    self._retrieval.commit(b, queries_LTHD, was_rejected=row.origins[-1] == "recovered")
            self._stats.num_rebuilds = self._retrieval.num_rebuilds
        if self._drafter:
            self._drafter.commit(self._sequences, active)
        rebuild_seconds = self._retrieval.rebuild_seconds - before if self._retrieval else 0.0
        self._stats.rebuild_seconds += rebuild_seconds
        self._stats.commit_seconds += time.perf_counter() - started - rebuild_seconds


def build_cascade(
    target: Llama,
    draft: Llama | None,
    full: FullCache,
    sequences: list[list[int]],
    seeds: list[int],
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    stats: Stats,
) -> tuple[Cascade, Policy | None]:
    """The stages of `speculation.method` over an empty full cache; without a `draft` model n-grams are the drafter.

    `sequences` are the prompts, which the cascade extends in place. The policy is that of the retrieval cache, if there
    is one; it may want to see the prompt.
    """
    B, method, config = len(sequences), speculation.method, target.config
    coins = CoupledCoins(seeds) if speculation.coupled else IndependentCoins(seeds)
    stage: Stage | None = None
    drafter: DraftReader | NgramDrafter | None = None
    retrieval: RetrievalCache | None = None
    policy: Policy | None = None
    stats.kv_cache_bytes = full.num_bytes
    if method in ("naive", "triforce"):
        stats.stages.append(LevelStats("draft"))
        if draft is None:
            stage = drafter = NgramDrafter(
                B, speculation.gamma1, stats.stages[-1], vocab_size=config.vocab_size, device=target.device
            )
        else:
            drafter = DraftReader(draft, B, sampling, speculation, vocab_size=config.vocab_size)
            stage = Level(drafter, None, coins, stats.stages[-1], block=speculation.gamma1)
            stats.kv_cache_bytes += drafter.window.num_bytes
    if method in ("retrieval", "triforce"):
        policy = make_policy(speculation.policy, full, speculation.chunk_size)
        budgets = [speculation.budget_for(len(sequence)) for sequence in sequences]
        retrieval = RetrievalCache(full, policy, speculation, budgets=budgets)
        reader = Reader(target, retrieval, sampling, vocab_size=config.vocab_size)
        stats.stages.append(LevelStats("retrieval"))
        stage = Level(reader, stage, coins, stats.stages[-1], block=speculation.gamma2)
        stats.kv_cache_bytes += retrieval.num_bytes
    queries_LBTHD = torch.empty(
        config.num_layers, B, speculation.max_block, config.num_heads, config.head_dim,
        dtype=target.dtype, device=target.device,
    )  # fmt: skip
    stats.stages.append(LevelStats("target"))
    reader = Reader(target, full, sampling, vocab_size=config.vocab_size, queries_LBTHD=queries_LBTHD)
    top = Level(reader, stage, coins, stats.stages[-1], block=1)
    return Cascade(top, sequences, Commit(sequences, queries_LBTHD, stats, retrieval, drafter)), policy
