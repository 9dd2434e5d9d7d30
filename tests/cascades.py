"""A session over tiny models with every part in reach: a `Generation` without text and events."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.config import ModelConfig
from minitri.core.decoding.level import Emitted
from minitri.core.errors import NotFiniteError
from minitri.core.graphs import GraphPool
from minitri.core.memory import Models
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.requests import End, Request
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.engine import Engine
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import CPU, byte_level_tokenizer, new_cache, tiny_config, tiny_model
from tools.runs import begin

GREEDY = SamplingParams()
WARM = SamplingParams(temperature=0.9, top_k=20, top_p=0.95)


class Rig:
    """One run, step by step; a row that has `num_new` tokens is retired."""

    def __init__(
        self,
        target: Llama,
        prompts: list[list[int]],
        *,
        draft: Llama | None = None,
        retrieval_model: Llama | None = None,
        num_new: int = 40,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        prefill_chunk: int = 16,
        full: FullCache | None = None,
        graphs: GraphPool | None = None,
        make_filters=lambda request: None,
        **speculation,
    ) -> None:
        self.prompts, self.num_new = prompts, num_new
        self.speculation = SpeculationConfig(**speculation)
        generation = GenerationConfig(num_new, prefill_chunk=prefill_chunk)
        requests = [
            Request(prompt, seed + b, sampling, generation) for b, prompt in enumerate(prompts)
        ]
        models = Models(target, retrieval_model or target, draft)
        memory = {"full": full, "graphs": graphs, "make_filters": make_filters}
        self.session = begin(models, requests, self.speculation, **memory)
        memory = self.memory = self.session.memory
        self.full, self.cascade = memory.full, self.session.cascade
        self.sequences, self.stats = self.session.sequences, self.session.stats
        self.small = memory.retrieval_cache
        runners = {"target": memory.target, "retrieval": memory.retrieval, "draft": memory.draft}
        self.runners = {name: runner for name, runner in runners.items() if runner is not None}
        for b in range(len(prompts)):
            for _ in self.session.prefill(b):
                pass

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


def plain_tokens(target: Llama, prompts: list[list[int]], **settings) -> list[list[int]]:
    """What the target says alone."""
    return Rig(target, prompts, method="autoregressive", **settings).run()


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


def fresh_read(model: Llama, tokens: list[int]) -> tuple[FullCache, Tensor]:
    """A new full cache that has read these tokens at once, and the logits (T, V) after each."""
    cache = new_cache(model.config, capacity=len(tokens) + 1)
    hidden_BTE = read_block(model, [tokens], cache)
    cache.advance([len(tokens)])
    return cache, model.logits(hidden_BTE[0])


def ends_of(events) -> list[End]:
    """How the requests of a run ended, in their order."""
    return sorted((event for event in events if isinstance(event, End)), key=lambda end: end.row)


def texts_of(events) -> list[tuple[int, ...]]:
    return [end.token_ids for end in ends_of(events)]


def settings_of(
    method: str = "autoregressive",
    num_new: int = 24,
    sampling: SamplingParams = GREEDY,
    *,
    prefill_chunk: int = 1024,
    seed: int = 0,
    **speculation,
) -> dict[str, object]:
    """What `generate` and `complete` are given for texts of just this length."""
    return {
        "sampling": sampling,
        "generation": GenerationConfig(num_new, ignore_eos=True, prefill_chunk=prefill_chunk),
        "speculation": SpeculationConfig(method, **speculation),
        "seed": seed,
    }


def random_prompt(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


def tiny_engine(*, noise: float | None = 0.02) -> Engine:
    """An engine without files, whose drafter is near to its model (`noise=None`: n-grams)."""
    model = tiny_model(tiny_config(vocab_size=320, context_length=512))
    draft = None if noise is None else near_copy(model, noise)
    return Engine(model, Tokenizer(TokenizersBackend(byte_level_tokenizer()), None), draft)
