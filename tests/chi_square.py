"""Chi-square tests of the joint distribution of three tokens, through the real engine.

The models are so small that the target's distribution over all texts of three tokens is known.
Marginals can be right while the joint is wrong (numbers used twice), so whole texts are counted.
"""

import itertools
import math
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
from minitri.core.requests import Request
from minitri.core.stack import Stack
from minitri.core.stats import Stats
from tests.conftest import tiny_model
from tests.core.rigs import new_cache, tiny_config
from tools.runs import begin

V, NUM_TOKENS, ROWS = 4, 3, 500
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
    q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int], *_: object
) -> Tensor:
    """Causal attention by the textbook, for rows of different lengths in one go."""
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    S = max(prefix_lengths) + T
    last_BT1 = torch.tensor(prefix_lengths)[:, None, None] + torch.arange(T)[:, None]
    is_seen_BTS = torch.arange(S) <= last_BT1
    values_BKSD = values_BKSD[:, :, :S].where(is_seen_BTS[:, -1, None, :, None], 0.0)
    q_BKGTD = q_BTHD.transpose(1, 2).unflatten(1, (keys_BKSD.shape[1], -1))
    scores_BKGTS = q_BKGTD @ keys_BKSD[:, :, None, :S].transpose(-1, -2) / math.sqrt(D)
    scores_BKGTS = scores_BKGTS.where(is_seen_BTS[:, None, None], -math.inf)
    out_BKGTD = scores_BKGTS.softmax(-1) @ values_BKSD[:, :, None]
    return out_BKGTD.flatten(1, 2).transpose(1, 2)


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
        read_prompt_once(session)
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


def read_prompt_once(session: Stack) -> None:
    """Reads the prompt for the first row, and copies what came of it to the others."""
    memory = session.memory
    full, cache, seen = memory.full, memory.retrieval_cache, []
    if cache is not None:
        observe = cache.observe
        cache.observe = lambda b, queries: (seen.append(queries.clone()), observe(b, queries))
    for _ in session.prefill(0):
        pass
    full.keys[:, 1:], full.values[:, 1:] = full.keys[:, :1], full.values[:, :1]
    full.advance([0 if b == 0 else full.lengths[0] for b in range(len(full.lengths))])
    if cache is not None:
        cache.observe = observe
        for b in range(1, len(full.lengths)):
            for queries in seen:
                observe(b, queries)


RUN = {"first seed": 0}
"""Of the run that begins; seeds the costs of its plans."""


def costs_that_change(*_: object) -> Callable[[str, float], float]:
    """Costs after which the autotuner takes another plan from step to step."""
    numbers = random.Random(RUN["first seed"])
    return lambda stage, num_guesses: numbers.choice([1.0, 10.0, 100.0])
