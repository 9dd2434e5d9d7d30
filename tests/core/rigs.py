"""Tiny models, and runs over them with every part in reach: a `Generation` without events. A policy
written as a user would."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import Policy
from minitri.core.config import ModelConfig
from minitri.core.decoding.level import Level
from minitri.core.decoding.verification import Emitted
from minitri.core.errors import NotFiniteError
from minitri.core.graphs import GraphPool
from minitri.core.memory import Models, allocate
from minitri.core.model.attention import Attend, attend_math
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.requests import Request, RequestState
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.shape import MemoryShape
from minitri.core.stack import Stack

CPU = torch.device("cpu")
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)


def tiny_config(**changes) -> ModelConfig:
    values = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    values |= {"num_kv_heads": 2, "head_dim": 8, "vocab_size": 64, "context_length": 256}
    return ModelConfig(**{**values, **changes})


def tiny_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attend: Attend = attend_math,
) -> Llama:
    generator = torch.Generator().manual_seed(seed)
    model = Llama(config, dtype=dtype, device=CPU, attend=attend)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def new_cache(
    config: ModelConfig, batch_size: int = 1, capacity: int = 64, dtype=torch.float32
) -> FullCache:
    return FullCache.allocate(Llama(config, dtype=dtype, device=CPU), batch_size, capacity)


class Rig:
    """One run, step by step; a row that has `num_new` tokens is retired."""

    level_type = Level
    """Of the levels of all rigs; `tests/conftest.py` sets one with trees."""

    def __init__(
        self,
        target: Llama,
        prompts: list[list[int]],
        *,
        draft: Llama | None = None,
        num_new: int = 40,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        prefill_chunk: int = 16,
        full: FullCache | None = None,
        graphs: GraphPool | None = None,
        **speculation,
    ) -> None:
        self.prompts, self.num_new = prompts, num_new
        self.speculation = SpeculationConfig(**speculation)
        generation = GenerationConfig(num_new, prefill_chunk=prefill_chunk)
        models = Models(target, target, draft, level_type=self.level_type)
        shape = MemoryShape(tuple(map(len, prompts)), sampling, generation, self.speculation)
        memory = self.memory = allocate(models, shape, full=full, graphs=graphs)
        self.session = session = Stack(memory, shape)
        self.full, self.small = memory.full, memory.retrieval_cache
        self.cascade, self.sequences, self.stats = session.cascade, session.sequences, session.stats
        self.runners = memory.runners
        requests = [Request(ids, seed + b, sampling, generation) for b, ids in enumerate(prompts)]
        states = [RequestState(b, request, request.prompt) for b, request in enumerate(requests)]
        for reading in [session.admit(b, state) for b, state in enumerate(states)]:
            deque(reading, 0)

    def start(self) -> dict[int, Emitted]:
        return self._retire_finished(self.session.start(list(range(len(self.prompts)))))

    def step(self) -> dict[int, Emitted]:
        return self._retire_finished(self.session.step())

    @torch.inference_mode()
    def run(self, after_step=lambda rig: None) -> list[list[int]]:
        """The new tokens of all rows, `num_new` each; calls `after_step` after each step."""
        self.start()
        after_step(self)
        while any(self.cascade.active):
            self.step()
            after_step(self)
        return self.new_tokens()

    def new_tokens(self) -> list[list[int]]:
        return [
            sequence[len(prompt) :][: self.num_new]
            for sequence, prompt in zip(self.sequences, self.prompts, strict=True)
        ]

    def num_verdicts(self) -> int:
        """Rounds that ended with one: all but the draft's, which verify nothing."""
        stages = self.stats.stages
        return sum(stage.num_rounds for stage in stages[1:] or stages)

    def _retire_finished(self, emitted: dict[int, Emitted]) -> dict[int, Emitted]:
        if not all(row.tokens for row in emitted.values()):
            raise NotFiniteError
        for b, new in enumerate(self.new_tokens()):
            if self.cascade.active[b] and len(new) >= self.num_new:
                self.cascade.retire(b)
        return emitted


def near_copy(model: Llama, noise: float, *, seed: int = 1) -> Llama:
    """A drafter that says nearly what the model says."""
    generator = torch.Generator().manual_seed(seed)
    copy = Llama(model.config, dtype=torch.float32, device=CPU, attend=model.attend).eval()
    for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        ours.copy_(theirs + noise * torch.randn(theirs.shape, generator=generator))
    return copy


def trimmed_copy(target: Llama, token_ids: Iterable[int]) -> Llama:
    """The target with a head over some tokens, which has no embeddings of its own."""
    ids = torch.tensor([*token_ids])
    config = replace(target.config, draft_of="target", head_size=len(ids))
    copy = Llama(config, dtype=torch.float32, device=CPU, target=target, attend=target.attend)
    names = dict(target.named_parameters())
    for name, weight in copy.named_parameters():
        if name in names:
            weight.copy_(names[name])
    copy.lm_head.token_ids.copy_(ids)
    copy.lm_head.linear.weight.copy_(target.lm_head.weight[ids])
    return copy.eval()


def fresh_read(model: Llama, tokens: list[int], size: int = 1 << 30) -> tuple[FullCache, Tensor]:
    """A new full cache that has read these tokens in such blocks, and logits (T, V) after each."""
    cache = new_cache(model.config, capacity=len(tokens) + 1, dtype=model.dtype)
    parts = []
    for start in range(0, len(tokens), size):
        hidden_BTE = read_block(model, [tokens[start : start + size]], cache)
        cache.advance([hidden_BTE.shape[1]])
        parts.append(model.logits(hidden_BTE[0]))
    return cache, torch.cat(parts)


def random_prompt(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


class ReceivedAttention(Policy):
    """Attention that each token got from all queries so far, its own included."""

    wants_prompt = True

    def __init__(self) -> None:
        self._received: dict[tuple[int, int], Tensor] = {}

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        T, _, D = queries_LTHD.shape[1:]
        for layer, (keys_KSD, _) in enumerate(full.layers(b)):
            places = torch.arange(end, device=keys_KSD.device)
            q_KGTD = queries_LTHD[layer].unflatten(1, (len(keys_KSD), -1)).permute(1, 2, 0, 3)
            scores_KGTS = (q_KGTD @ keys_KSD[:, None, :end].mT / math.sqrt(D)).float()
            is_future_TS = places > places[end - T :, None]
            received_KS = scores_KGTS.masked_fill(is_future_TS, -math.inf).softmax(-1).sum((1, 2))
            if (before := self._received.get((b, layer))) is not None:
                num = min(before.shape[1], end)
                received_KS[:, :num] += before[:, :num]
            self._received[b, layer] = received_KS

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        K, N, M = chunks_KNMD.shape[:3]
        received_KS = self._received[b, layer][:, : N * M]
        scores_KS = received_KS.new_full((K, N * M), -math.inf)
        scores_KS[:, : received_KS.shape[1]] = received_KS
        return scores_KS.unflatten(1, (N, M)).sum(2)

    def reset(self, b: int) -> None:
        self._received = {key: value for key, value in self._received.items() if key[0] != b}


def policy_of(name: Any) -> Any:
    """What `SpeculationConfig(policy=...)` takes: a new object if it is called "received"."""
    return ReceivedAttention() if name == "received" else name
