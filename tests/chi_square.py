"""Chi-square tests of the joint distribution of three tokens, through the real engine.

The models are so small that the target's distribution over all texts of three tokens is known.
Marginals can be right while the joint is wrong (numbers used twice), so whole texts are counted.
Seeds are fixed, hence every test is deterministic; its odds of a false alarm are those of seeds
drawn anew.
"""

from __future__ import annotations

import itertools
import math

import torch

from minitri import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding.sampling import probs_from_logits
from minitri.decoding.verification import Proposal, Verdict, verify
from minitri.model.attention import attend_math
from minitri.model.llama import Llama
from minitri.session import Batch, Session
from tests.conftest import new_cache, tiny_config, tiny_model

V, NUM_TOKENS, ROWS = 4, 3, 500
PROMPT = [1, 3, 2, 0, 3, 1, 2]
FALSE_ALARM = 1e-5
"""Odds of each test."""
SMALL = {"budget": 4, "chunk_size": 2, "num_sink_tokens": 1, "num_recent_tokens": 3}
"""A retrieval cache smaller than the prompt, so that the retrieval level is often wrong."""


def target_model() -> Llama:
    return model_of(V, seed=0)


def other_model(vocab_size: int = V) -> Llama:
    """An adversarial drafter: its favourites are not the target's."""
    return model_of(vocab_size, seed=9)


def model_of(vocab_size: int, seed: int) -> Llama:
    """One layer, and the oracle's attention, which takes all rows of a batch at once."""
    model = tiny_model(tiny_config(vocab_size=vocab_size, num_layers=1), seed=seed)
    model.attend = attend_math
    return model


def exact_probs(model: Llama, sampling: SamplingParams) -> torch.Tensor:
    """(V,) * NUM_TOKENS, by the model's own forward passes in float64 softmax."""
    sequences = [list(tokens) for tokens in itertools.product(range(V), repeat=NUM_TOKENS - 1)]
    block = torch.tensor([[*PROMPT, *tokens] for tokens in sequences])
    cache = new_cache(model.config, len(sequences))
    hidden = model(block, torch.arange(block.shape[1]).expand_as(block), cache)
    logits = model.logits(hidden[:, len(PROMPT) - 1 :])[..., :V].double()
    probs = probs_from_logits(logits.flatten(0, 1), sampling).view(-1, NUM_TOKENS, V)
    joint = torch.ones((V,) * NUM_TOKENS, dtype=torch.float64)
    for number, tokens in enumerate(sequences):
        for i, token in enumerate(tokens):
            joint[tuple(tokens)] *= probs[number, i, token]
        joint[tuple(tokens)] *= probs[number, -1]
    return joint


@torch.inference_mode()
def count_texts(
    target: Llama, draft: Llama | None, sampling: SamplingParams, speculation: SpeculationConfig,
    num_seeds: int,
) -> torch.Tensor:  # fmt: skip
    """How often each text comes, (V,) * NUM_TOKENS, over seeds 0 .. num_seeds - 1.

    A session steps without a `Generation` around it: all tokens are counted, no text is made.
    """
    counts = torch.zeros((V,) * NUM_TOKENS, dtype=torch.float64)
    generation = GenerationConfig(NUM_TOKENS)
    for first in range(0, num_seeds, ROWS):
        seeds = list(range(first, min(first + ROWS, num_seeds)))
        batch = Batch([PROMPT] * len(seeds), seeds, sampling, generation, speculation)
        session = Session(target, draft, batch)
        session.begin(batch)
        prefill_all(session)
        cascade = session.cascade
        cascade.start()
        while any(cascade.active):
            cascade.step()
            for b, sequence in enumerate(session.sequences):
                if cascade.active[b] and len(sequence) >= len(PROMPT) + NUM_TOKENS:
                    cascade.retire(b)
        for sequence in session.sequences:
            counts[tuple(sequence[len(PROMPT) :][:NUM_TOKENS])] += 1
    return counts


def prefill_all(session: Session) -> None:
    """Reads the prompt for the first row, and hands what came of it to the others."""
    full, cache, seen = session.full, session.retrieval_cache, []
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


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Odds that a sound engine is as far from its distribution; cells of less than 5 expected are
    put together, and a text of probability 0 makes it 0."""
    if counts[probs == 0].sum() > 0:
        return 0.0
    observed, expected = cells(counts, probs), cells(probs, probs) * counts.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0), statistic / 2))


def cells(values: torch.Tensor, probs: torch.Tensor, least: float = 1e-3) -> torch.Tensor:
    is_common = probs >= least
    rare = values[~is_common & (probs > 0)].sum().view(1)
    return torch.cat((values[is_common], rare if rare > 0 else rare[:0]))


def smallest_error(probs: torch.Tensor, num_seeds: int, power: float = 0.99) -> float:
    """The relative error of the probabilities (root mean square) that is found with odds of
    `power`, by the normal approximation of the noncentral chi-square distribution."""
    freedom = len(cells(probs, probs)) - 1
    limit = next(
        x for x in itertools.count(freedom)
        if torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(x / 2)) < FALSE_ALARM
    )  # fmt: skip
    z = float(torch.special.ndtri(torch.tensor(power)))
    shift = next(
        s for s in itertools.count(1)
        if freedom + s - z * math.sqrt(2 * freedom + 4 * s) > limit
    )  # fmt: skip
    return math.sqrt(shift / num_seeds)


def reuse_number(proposal: Proposal, probs_BNV: torch.Tensor, uniforms_BN: torch.Tensor) -> Verdict:
    """A bug: the number of the last test is used again for the recovered or bonus token."""
    numbers_BN, sound = uniforms_BN.clone(), verify(proposal, probs_BNV, uniforms_BN)
    for b, (n, row) in enumerate(zip(sound.num_accepted, proposal.tokens, strict=True)):
        if row:
            numbers_BN[b, -1] = uniforms_BN[b, min(n, len(row) - 1)]
    return verify(proposal, probs_BNV, numbers_BN)
