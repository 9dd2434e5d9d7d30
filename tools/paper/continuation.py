"""A text as the target goes on with it, against which any guesses can be held without more draws.

The target continues a prompt once with its full cache, and the distribution of every token is kept.
Then the same continuation is put through a retrieval cache, `gamma` tokens between two commits as
the method `retrieval` would, or through a drafter. A rate is the expected one along this text: a
guess sampled from q is accepted by p with probability sum(min(p, q)), and tested if all before it
in its block were accepted. So no sampling adds noise, and all policies, budgets and drafters meet
the same tokens: differences are much better known than the rates themselves, of which the standard
error is given.

Legend: N new tokens, V vocabulary, L layers, T tokens, H query heads, K KV heads, D head dim,
S prompt tokens, Q queries, B windows.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitri import Engine, SamplingParams, SpeculationConfig
from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.sampling import pad_vocabulary, probs_of_rows, sample
from minitri.core.decoding.verification import Proposal
from minitri.core.model.block import empty_queries, read_block
from minitri.core.model.llama import Llama
from minitri.core.prefill import prefill
from minitri.core.runner import DraftRunner, ModelRunner, Passes
from minitri.core.settings import LONGEST_BLOCK
from minitri.text.prompt_ids import check_prompt
from tools.paper.baselines.bounds import top_tokens

CHUNK = 1024
"""Tokens of the prompt that are read at a time."""
WINDOWS_AT_ONCE = 16
"""Windows read at once, which bounds the memory of recomputed sliding windows."""


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
        check_prompt(prompt, engine.config, new_tokens)
        self.model = model = engine.model
        self.drafter = engine.models.draft or model
        self.num_prompt = len(prompt)
        self.tokens = list(prompt)
        self.full = FullCache.allocate(model, 1, len(prompt) + new_tokens + LONGEST_BLOCK)
        self._read(0)
        self.say(sampling, new_tokens, seed)

    def _read(self, start: int, watch: Callable[[Tensor], None] | None = None) -> None:
        """Reads the prompt from a token on, anew; `watch` is given the queries."""
        self.full.crop([start])
        prompt = self.tokens[: self.num_prompt]
        deque(prefill(self.model, prompt, self.full, 0, chunk=CHUNK, watch=watch), 0)

    @torch.inference_mode()
    def say(self, sampling: SamplingParams, num_new: int, seed: int) -> None:
        """Continues the prompt, in place of what was said before."""
        self.sampling = sampling
        generator = torch.Generator().manual_seed(seed)
        del self.tokens[self.num_prompt :]
        self.full.crop([self.num_prompt - 1])
        query_LBTHD = empty_queries(self.model, 1, 1)
        runner = self._runner(ModelRunner, self.model, self.full, queries_LBTHD=query_LBTHD)
        probs, queries = [], []
        for _ in range(num_new):
            probs.append(runner.next_probs([self.tokens], [True]).probs_BNV[0, -1])
            queries.append(query_LBTHD[:, 0].clone())
            uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(self.model.device)
            self.tokens.append(int(sample(probs[-1][None], uniform)))
        self.probs_NV = torch.stack(probs)
        """Row i: the distribution of the i-th new token."""
        self.queries_LNHD = torch.cat(queries, 1)
        """Distributions after the last prompt token and after every new token but the last."""

    @torch.inference_mode()
    def by_cache(self, speculation: SpeculationConfig, gamma: int, *models: Llama) -> list[Tensor]:
        """Distributions (N, V) of guesses with a retrieval cache of these settings, by the weights
        of each of these models, for which it is filled once."""
        budgets = [speculation.budget_for(self.num_prompt)]
        cache = RetrievalCache(self.full, self.model, speculation, budgets)
        window = cache.max_prompt_queries
        start = 0 if window is None else max(0, self.num_prompt - 1 - window)
        self._read(start, lambda queries_LTHD: cache.observe(0, queries_LTHD))
        runners = [self._runner(ModelRunner, model, cache) for model in models]

        def commit(num_tokens: int) -> None:
            first = self.full.lengths[0] - (self.num_prompt - 1)
            queries_LTHD = self.queries_LNHD[:, first : num_tokens - self.num_prompt]
            self.full.advance([queries_LTHD.shape[1]])
            cache.commit(0, queries_LTHD)
            cache.take_committed([True])

        return self._probs(runners, commit, gamma)

    @torch.inference_mode()
    def by_top_tokens(self, budget: int, gamma: int, num_whole: int = 0) -> Tensor:
        """Distributions (N, V) of guesses where every query chooses its own best tokens of the
        whole text, but in the first layers: what no policy can know."""
        slots = [it[..., self.num_prompt - 1 :, :] for it in (self.full.keys, self.full.values)]
        exact = [it.clone() for it in slots]

        def commit(num_tokens: int) -> None:
            for new_LBKTD, exact_LBKTD in zip(slots, exact, strict=True):
                new_LBKTD.copy_(exact_LBKTD)  # over those of the latest block of guesses
            self.full.hold(0, num_tokens - 1, num_tokens - 1)

        model = top_tokens(self.model, budget, num_whole)
        [probs_NV] = self._probs([self._runner(ModelRunner, model, self.full)], commit, gamma)
        commit(self.num_prompt)
        return probs_NV

    @torch.inference_mode()
    def by_drafter(self, drafter: Llama, gamma: int, num_recent_tokens: int = 252) -> Tensor:
        """The distributions (N, V) of a drafter with a streaming cache."""
        settings = SpeculationConfig("naive", gamma1=gamma, num_recent_tokens=num_recent_tokens)
        cache = StreamingCache(drafter, 1, settings)
        runner = self._runner(DraftRunner, drafter, cache)
        return self._probs([runner], lambda n: runner.prepare([self.tokens[:n]], [True]), gamma)[0]

    @torch.inference_mode()
    def by_window(self, drafter: Llama, num_tokens: int) -> Tensor:
        """The distributions (N, V) of a drafter that reads the latest tokens anew for every guess,
        from position 0 on: sliding window with re-computation."""
        width = min(num_tokens, self.num_prompt)
        size = self.model.config.vocab_size
        probs = [self.probs_NV[:1]]
        ends = range(self.num_prompt + 1, len(self.tokens))
        for first in range(0, len(ends), WINDOWS_AT_ONCE):
            windows = [self.tokens[end - width : end] for end in ends[first:][:WINDOWS_AT_ONCE]]
            cache = FullCache.allocate(drafter, len(windows), width)
            with drafter.execution.reading():
                hidden_BTE = read_block(drafter, windows, cache, is_prompt=True)
            logits_B1V = drafter.logits(hidden_BTE[:, -1:])[..., :size]
            probs_B1V = probs_of_rows(logits_B1V, [self.sampling] * len(windows))
            probs.append(pad_vocabulary(probs_B1V, size)[:, 0])
        return torch.cat(probs)

    def attention(self, layer: int, first: int, num_queries: int) -> Tensor:
        """The attention (H, Q, S) of the last prompt token, or of the new ones after it from
        `first` on, to the prompt; that to other new tokens is left out, and the rest sums to 1."""
        keys_KSD = self.full.keys[layer, 0, :, : self.num_prompt]
        queries_QHD = self.queries_LNHD[layer, first : first + num_queries]
        q_KRD = queries_QHD.transpose(0, 1).unflatten(0, (len(keys_KSD), -1)).flatten(1, 2)
        scores_KRS = (q_KRD / math.sqrt(q_KRD.shape[2])) @ keys_KSD.transpose(1, 2)
        return scores_KRS.float().softmax(2).unflatten(1, (-1, len(queries_QHD))).flatten(0, 1)

    def rate(self, probs_NV: Tensor, gamma: int) -> Rate:
        """How many of these guesses the target accepts."""
        return expected_rate(probs_NV, self.probs_NV, gamma)

    def _runner(self, kind: Any, model: Llama, cache: Any, **settings: Any) -> Any:
        size = self.model.config.vocab_size
        return kind(Passes(model, cache, self.sampling, size, **settings))

    def _probs(
        self, runners: Sequence[ModelRunner], commit: Callable[[int], None], gamma: int
    ) -> list[Tensor]:
        """The new tokens' distributions of stages that share a cache, as far as whole blocks go. It
        learns of gamma + 1 tokens at once."""
        probs = [[self.probs_NV[:1]] for _ in runners]
        for num_done in range(1, len(self.probs_NV) - gamma, gamma + 1):
            end = self.num_prompt + num_done
            commit(end)
            nothing = torch.empty(1, gamma, 0, device=self.model.device)
            guesses = Proposal.of([self.tokens[end : end + gamma]], nothing, [["draft"] * gamma])
            for runner, found in zip(runners, probs, strict=True):
                runner.cache.crop([end - 1])
                found.append(runner.next_probs([self.tokens[:end]], [True], guesses).probs_BNV[0])
        return [torch.cat(found) for found in probs]


def expected_rate(probs_NV: Tensor, verifier_NV: Tensor, gamma: int) -> Rate:
    """Expected accepted over expected tested guesses, and the standard error of that; guesses come
    gamma at a time, to which the verifier adds one. The first row is the verifier's own."""
    accepted, tested = [], []
    end = min(len(probs_NV), len(verifier_NV))
    for i in range(1, end, gamma + 1):
        block = slice(i, min(i + gamma, end))
        overlap_N = torch.minimum(probs_NV[block], verifier_NV[block]).sum(1)
        survival = overlap_N.clamp(max=1).cumprod(0).tolist()
        accepted.append(sum(survival))
        tested.append(1 + sum(survival[:-1]))
    rate = sum(accepted) / sum(tested)
    misses = [a - rate * t for a, t in zip(accepted, tested, strict=True)]
    return Rate(rate, math.sqrt(sum(miss * miss for miss in misses)) / sum(tested))
