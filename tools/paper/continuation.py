"""A text as the target goes on with it, against which any guesses can be held without more draws.

The target continues a prompt once with its full cache, and the distribution of every token is kept.
Then the same continuation is put through a retrieval cache, `gamma` tokens between two commits as
the method `retrieval` would, or through a drafter. A rate is the expected one: a guess sampled from
q is accepted by p with probability sum(min(p, q)), and tested if all before it in its block were
accepted. So no sampling adds noise, and all policies, budgets and drafters meet the same tokens:
differences are much better known than the rates themselves, of which the standard error is given.

Legend: N new tokens, V vocabulary, L layers, T tokens, H query heads, D head dim.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitri import Engine, SamplingParams, SpeculationConfig
from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.decoding.sampling import sample
from minitri.decoding.verification import Proposal
from minitri.loading.prompt_ids import check_prompt
from minitri.model.llama import Llama
from minitri.runner import DraftRunner, ModelRunner, prefill
from minitri.settings import LONGEST_BLOCK

CHUNK = 1024
"""Tokens of the prompt that are read at a time."""
MOST_OBSERVED = 1024
"""The longest observation window whose queries are kept of the prompt."""


class Rate(NamedTuple):
    """Expected accepted / tested, and its standard error."""

    mean: float
    error: float


class Continuation:
    """A prompt and what the target said after it, with the full cache, distributions, queries."""

    @torch.inference_mode()
    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        sampling: SamplingParams,
        new_tokens: int,
        seed: int = 0,
    ) -> None:
        """Reads and continues the prompt. Raises `InputError` if it is too long."""
        model = engine.model
        check_prompt(prompt, engine.config, new_tokens)
        self.model = model
        self.num_prompt = len(prompt)
        self.tokens = list(prompt)
        self.sampling = sampling
        self._options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        capacity = len(prompt) + new_tokens + LONGEST_BLOCK
        self.full = FullCache.allocate(engine.config, 1, capacity, **self._options)
        self._read(self._keep_latest)
        self._continue(new_tokens, torch.Generator().manual_seed(seed))

    def _keep_latest(self, queries_LTHD: Tensor) -> None:
        self.prompt_queries_LTHD = queries_LTHD[:, -MOST_OBSERVED:].clone()

    def _read(self, watch: Callable[[Tensor], None]) -> None:
        self.full.crop([0])
        prompt = self.tokens[: self.num_prompt]
        for _ in prefill(self.model, prompt, self.full, 0, chunk=CHUNK, watch=watch):
            pass

    def _continue(self, num_new: int, generator: torch.Generator) -> None:
        config = self.model.config
        shape = (config.num_layers, 1, 1, config.num_heads, config.head_dim)
        query = torch.empty(shape, **self._options)
        runner = ModelRunner(
            self.model, self.full, self.sampling, vocab_size=config.vocab_size, queries_LBTHD=query
        )
        probs, queries = [], []
        for _ in range(num_new):
            probs.append(runner.next_probs([self.tokens], [True]).probs_BNV[0, -1])
            queries.append(query[:, 0].clone())
            uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(self.model.device)
            self.tokens.append(int(sample(probs[-1][None], uniform)))
        self.probs_NV = torch.stack(probs)
        """Row i: the distribution of the i-th new token."""
        self.queries_LNHD = torch.cat(queries, 1)
        """Those of the last prompt token and of every new token but the last."""

    @torch.inference_mode()
    def by_cache(
        self, speculation: SpeculationConfig, gamma: int, model: Llama | None = None
    ) -> Tensor:
        """Distributions (N, V) of guesses with a retrieval cache of these settings, by the target's
        weights or those of another `model`."""
        cache = RetrievalCache(
            self.full,
            speculation,
            budgets=[speculation.budget_for(self.num_prompt)],
            num_heads=self.model.config.num_heads,
        )
        if cache.max_prompt_queries is None:
            self._read(lambda queries_LTHD: cache.observe(0, queries_LTHD))
        else:
            self.full.crop([self.num_prompt - 1])
            cache.observe(0, self.prompt_queries_LTHD)
        runner = ModelRunner(
            model or self.model, cache, self.sampling, vocab_size=self.probs_NV.shape[1]
        )

        def commit(num_tokens: int) -> None:
            first = self.full.lengths[0] - (self.num_prompt - 1)
            queries_LTHD = self.queries_LNHD[:, first : num_tokens - self.num_prompt]
            self.full.advance([queries_LTHD.shape[1]])
            cache.commit(0, queries_LTHD)

        return self._probs(runner, commit, gamma)

    @torch.inference_mode()
    def by_drafter(self, drafter: Llama, gamma: int, num_recent_tokens: int = 252) -> Tensor:
        """The distributions (N, V) of a drafter with a streaming cache."""
        settings = SpeculationConfig("naive", gamma1=gamma, num_recent_tokens=num_recent_tokens)
        vocab_size = self.probs_NV.shape[1]
        cache = StreamingCache(drafter.config, drafter.rope, 1, settings, **self._options)
        runner = DraftRunner(drafter, cache, self.sampling, vocab_size=vocab_size)
        return self._probs(runner, lambda n: runner.prepare([self.tokens[:n]], [True]), gamma)

    def rate(self, probs_NV: Tensor, gamma: int, verifier_NV: Tensor | None = None) -> Rate:
        """How many of these guesses the target, or another verifier, accepts."""
        return expected_rate(probs_NV, self.probs_NV if verifier_NV is None else verifier_NV, gamma)

    def _probs(self, runner: ModelRunner, commit: Callable[[int], None], gamma: int) -> Tensor:
        """A stage's distributions of the new tokens, as far as whole blocks go. Its cache learns of
        gamma + 1 tokens at once."""
        probs = [self.probs_NV[:1]]
        while (num_done := sum(map(len, probs))) + gamma < len(self.probs_NV):
            end = self.num_prompt + num_done
            commit(end)
            nothing = torch.empty(1, gamma, 0, device=self.model.device)
            guesses = Proposal.of([self.tokens[end : end + gamma]], nothing, [["draft"] * gamma])
            probs.append(runner.next_probs([self.tokens[:end]], [True], guesses).probs_BNV[0])
        return torch.cat(probs)


def expected_rate(probs_NV: Tensor, verifier_NV: Tensor, gamma: int) -> Rate:
    """Expected accepted over expected tested guesses, and the standard error of that; guesses come
    gamma at a time, to which the verifier adds one."""
    accepted, tested = [], []
    for i in range(1, min(len(probs_NV), len(verifier_NV)) - gamma, gamma + 1):
        overlap_N = torch.minimum(probs_NV[i : i + gamma], verifier_NV[i : i + gamma]).sum(1)
        survival = overlap_N.clamp(max=1).cumprod(0).tolist()
        accepted.append(sum(survival))
        tested.append(1 + sum(survival[:-1]))
    rate = sum(accepted) / sum(tested)
    misses = [a - rate * t for a, t in zip(accepted, tested, strict=True)]
    return Rate(rate, math.sqrt(sum(miss * miss for miss in misses)) / sum(tested))
