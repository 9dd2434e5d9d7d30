"""The joint distribution of three tokens through the real engine: greedy and coupled runs cannot
see a wrong q, and marginals can be right while the joint is wrong (numbers used twice).

Models are so small that the target's distribution over all texts is known. An adversarial drafter,
a retrieval cache of a quarter of the prompt, and 4,000 seeds. A false alarm would have odds of 1 in
100,000 per test, if the seeds were drawn again.
"""

import itertools
import random

import pytest
import torch
from torch import Tensor

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.decoding import autotuner
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.devices.gpu.attention_backends import attend_masked
from minitri.text.tokenizer import Tokenizer
from tests.conftest import byte_level_tokenizer, texts_of, tiny_model
from tests.core.exactness import FALSE_ALARM, p_value
from tests.core.rigs import new_cache, tiny_config, trimmed_copy

V, NUM_TOKENS, ROWS = 4, 3, 250
FIRST_SEED, NUM_SEEDS = 10_000, 4_000
"""Seeds are fixed, so that a sound engine always passes: with these no p-value is below 0.05."""
PROMPT = [1, 3, 1, 2, 0, 3, 2, 0, 0, 0, 2, 1, 2, 3, 3, 2]
SMALL = {"budget": 4, "chunk_size": 2, "num_sink_tokens": 1, "num_recent_tokens": 3}
"""Caches for four tokens of a prompt of 16, so that the retrieval level is often wrong."""


def model_of(vocab_size: int, seed: int = 9) -> Llama:
    """One layer, whose attention matters; by default a drafter with other favourites."""
    model = tiny_model(tiny_config(vocab_size=vocab_size, num_layers=1), seed=seed)
    model.layers[0].input_layernorm.weight.fill_(1)
    model.attend = attend_together
    return model


def attend_together(q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, mask_TT=None, *_) -> Tensor:
    """Rows of different lengths in one go."""
    return attend_masked(q_BTHD, keys_BKSD, values_BKSD, torch.tensor(prefix_lengths), mask_TT)


def exact_probs(model: Llama, sampling: SamplingParams) -> Tensor:
    """(V,) * NUM_TOKENS, by the model's own forward passes in float64 softmax."""
    texts = torch.tensor([*itertools.product(range(V), repeat=NUM_TOKENS)])
    blocks = [[*PROMPT, *text] for text in texts[:, :-1].tolist()]
    hidden = read_block(model, blocks, new_cache(model.config, len(texts)))
    logits = model.logits(hidden[:, len(PROMPT) - 1 :])[..., :V].double()
    probs_BNV = probs_from_logits(logits.flatten(0, 1), sampling).view(-1, NUM_TOKENS, V)
    probs_B = probs_BNV.gather(2, texts.unsqueeze(2)).prod(1)
    return probs_B.view((V,) * NUM_TOKENS)


FILTERED, OTHERWISE = SamplingParams(0.8, top_p=0.95), SamplingParams(1.1, top_k=3, min_p=0.02)


class Biased:
    """A drafter from outside that is sure of a wrong token, whatever the filters."""

    def guess(self, tokens: list[int], row: int) -> list[float]:
        return [0.625 if token == tokens[-1] else 0.125 for token in range(V)]


DRAFTERS = {
    "half of the tokens": lambda target: model_of(V // 2),
    "three times as many": lambda target: model_of(3 * V),
    "trimmed head": lambda target: trimmed_copy(model_of(V), [2, 0]),
    "lookup": lambda target: None,
    "plug-in": lambda target: Biased(),
}


def case(sampling, method, drafter="", gamma1=1, **settings):
    """The filters, the drafter, and how it is used."""
    settings = {"gamma1": gamma1, "gamma2": 2, **SMALL, **settings}
    return sampling, drafter, SpeculationConfig(method, **settings)


METHODS = "autoregressive", "retrieval", "triforce", "auto"
CASES = {method: case(FILTERED, method) for method in METHODS}
CASES |= {f"{drafter}, naive": case(OTHERWISE, "naive", drafter, 2) for drafter in DRAFTERS}
CASES |= {
    "trimmed head, triforce": case(OTHERWISE, "triforce", "trimmed head", 2),
    "lookup, auto": case(OTHERWISE, "auto", "lookup", 2),
    "longer guesses": case(OTHERWISE, "triforce", gamma1=2),
    "coupled": case(OTHERWISE, "autoregressive", coupled=True),  # as all: `tests/test_matrix.py`
    "tree": case(FILTERED, "naive", gamma1=2, tree="4"),
    "tree below": case(OTHERWISE, "triforce", gamma1=None, tree="2x2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_tokens_follow_the_joint_distribution(case, monkeypatch):
    sampling, drafter, speculation = CASES[case]
    target = model_of(V, seed=0)
    draft = DRAFTERS[drafter](target) if drafter else model_of(V)
    models = (None, None, draft) if isinstance(draft, Biased) else (draft,)
    engine = Engine(target, Tokenizer(byte_level_tokenizer()), *models)
    probs = exact_probs(target, sampling)
    # Costs change, so that the autotuner takes another plan from step to step.
    numbers = random.Random(0)
    cost = lambda *_: numbers.choice([1.0, 10.0, 100.0])  # noqa: E731
    monkeypatch.setattr("minitri.core.stack.Stack.predictor_for", lambda *_: cost)
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(autotuner.Autotuner, "wants_retrieval", always, raising=False)
    counts, runs = torch.zeros((V,) * NUM_TOKENS, dtype=torch.float64), []
    how = {"sampling": sampling, "generation": GenerationConfig(NUM_TOKENS)}
    for first in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, ROWS):
        run = engine.generate([PROMPT] * ROWS, speculation=speculation, seed=first, **how)
        for text in texts_of(run):
            counts[text] += 1
        runs.append(run.stats)
    found = p_value(counts, probs)
    print(f"\n  {case}: p-value {found:.3g} over {NUM_SEEDS} seeds")
    # Speculation that is always right, or always wrong, shows little.
    for stage in zip(*(run.stages for run in runs), strict=True):
        accepted = sum(run.num_accepted_tokens for run in stage)
        tested = sum(run.num_tested_tokens for run in stage)
        assert not tested or accepted > 100
        assert not tested or drafter or 0.1 < accepted / tested < 0.9
    plans = {plan for run in runs for plan in run.steps_per_plan}
    assert len(plans) == (4 if speculation.method == "auto" else 1)
    assert found > FALSE_ALARM
