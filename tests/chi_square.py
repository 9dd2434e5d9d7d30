"""Chi-square tests of the joint distribution of three tokens, through the real engine.

The models are so small that the target's distribution over all texts of three tokens is known.
Marginals can be right while the joint is wrong (numbers used twice), so whole texts are counted.
"""

import itertools
import random
from collections.abc import Callable

import torch
from torch import Tensor

from minitri import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.drafters.plugin import Drafter
from minitri.core.memory import Models
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.prefill import prefill
from minitri.core.requests import Request
from minitri.core.stack import Stack
from minitri.core.stats import Stats
from minitri.devices.gpu.attention_backends import attend_masked
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, tiny_config
from tools.runs import begin

V, NUM_TOKENS, ROWS = 4, 3, 250
PROMPT = [1, 3, 1, 2, 0, 3, 2, 0, 0, 0, 2, 1, 2, 3, 3, 2]
SMALL = {"budget": 4, "chunk_size": 2, "num_sink_tokens": 1, "num_recent_tokens": 3}
"""Caches for four tokens of a prompt of 16, so that the retrieval level is often wrong."""


def model_of(vocab_size: int, seed: int) -> Llama:
    """One layer, whose attention matters."""
    model = tiny_model(tiny_config(vocab_size=vocab_size, num_layers=1), seed=seed)
    model.layers[0].input_layernorm.weight.fill_(1)
    model.attend = attend_together
    return model


def target_model() -> Llama:
    return model_of(V, seed=0)


def other_model(vocab_size: int = V) -> Llama:
    """An adversarial drafter: its favourites are not the target's."""
    return model_of(vocab_size, seed=9)


def attend_together(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    *_: object,
) -> Tensor:
    """Rows of different lengths in one go."""
    return attend_masked(q_BTHD, keys_BKSD, values_BKSD, torch.tensor(prefix_lengths), rule_TT)


def exact_probs(model: Llama, sampling: SamplingParams) -> Tensor:
    """(V,) * NUM_TOKENS, by the model's own forward passes in float64 softmax."""
    texts = torch.tensor([*itertools.product(range(V), repeat=NUM_TOKENS)])
    blocks = [[*PROMPT, *text] for text in texts[:, :-1].tolist()]
    hidden = read_block(model, blocks, new_cache(model.config, len(texts)))
    logits = model.logits(hidden[:, len(PROMPT) - 1 :])[..., :V].double()
    probs_BNV = probs_from_logits(logits.flatten(0, 1), sampling).view(-1, NUM_TOKENS, V)
    probs_B = probs_BNV.gather(2, texts.unsqueeze(2)).prod(1)
    return probs_B.view((V,) * NUM_TOKENS)


@torch.inference_mode()
def count_texts(
    target: Llama,
    draft: Llama | Drafter | None,
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    num_seeds: int,
) -> tuple[Tensor, list[Stats]]:
    """How often each text comes over so many seeds, (V,) * NUM_TOKENS, and all statistics."""
    generation, stats = GenerationConfig(NUM_TOKENS), []
    counts = torch.zeros((V,) * NUM_TOKENS, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    for first in range(0, num_seeds, ROWS):
        seeds = list(range(first, first + ROWS))
        RUN["first seed"] = first
        requests = [Request(PROMPT, seed, sampling, generation) for seed in seeds]
        is_model = draft is None or isinstance(draft, Llama)
        models = Models(target, target, *(draft, None) if is_model else (None, draft))
        session = begin(models, requests, speculation)
        read_prompt_once(session, target)
        cascade = session.cascade
        session.start(list(range(ROWS)))
        while any(cascade.active):
            session.step()
            for b, sequence in enumerate(session.sequences):
                if cascade.active[b] and len(sequence) >= len(PROMPT) + NUM_TOKENS:
                    cascade.retire(b)
        texts = [sequence[len(PROMPT) :][:NUM_TOKENS] for sequence in session.sequences]
        counts.index_put_(torch.tensor(texts).unbind(1), one, accumulate=True)
        stats.append(session.stats)
    return counts, stats


def read_prompt_once(session: Stack, target: Llama) -> None:
    """Reads the prompt for the first row, and copies what came of it to the others."""
    full, cache, seen = session.memory.full, session.memory.retrieval_cache, list[Tensor]()
    list(prefill(target, PROMPT, full, 0, chunk=len(PROMPT), watch=seen.append))
    for slots in (full.keys, full.values):
        slots[:, 1:] = slots[:, :1]
    full.advance([0, *[len(PROMPT) - 1] * (ROWS - 1)])
    for b in range(ROWS) if cache is not None else ():
        cache.observe(b, seen[0])


RUN = {"first seed": 0}
"""Of the run that begins; seeds the costs of its plans."""


def costs_that_change(*_: object) -> Callable[[str, float], float]:
    """Costs after which the autotuner takes another plan from step to step."""
    numbers = random.Random(RUN["first seed"])
    return lambda stage, num_guesses: numbers.choice([1.0, 10.0, 100.0])
