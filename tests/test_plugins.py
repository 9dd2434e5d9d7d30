"""Drafters and policies from outside, by the public protocols alone, and plug-ins that break them.

Equal texts are in `tests/test_matrix.py`."""

import math
from unittest.mock import Mock

import pytest
import torch

import minitri
from tests.conftest import load, settings_of
from tests.core.rigs import WARM

PROMPT = "She had been forced into prudence; she had been forced into romance; she had been"
GREEDY = minitri.SamplingParams(), False
COUPLED = minitri.SamplingParams(0.8, top_p=0.9), True


class Sometimes:
    """A drafter: the last token again, after two of three lengths."""

    def guess(self, tokens: list[int], row: int) -> int | None:
        return tokens[-1] if len(tokens) % 3 else None


class Weighted(minitri.Policy):
    """A policy: the best chunks by their mean keys."""

    def __init__(self) -> None:
        self.weight, self.seen = 1.0, set()

    def scores(self, layer, b, q_KRD, chunks_KNMD):
        self.seen.add((layer, b))
        return self.weight * (q_KRD @ chunks_KNMD.mean(2).mT).amax(1)


def with_drafter(engine, drafter) -> minitri.Engine:
    return minitri.Engine(engine.model, engine.tokenizer, drafter=drafter)


def complete(engine, distribution, method, prompt=PROMPT, **settings) -> minitri.Completion:
    sampling, coupled = distribution
    settings |= {"gamma1": 3, "gamma2": 4, "budget": 24, "rebuild_stride": 8, "coupled": coupled}
    return engine.complete(prompt, **settings_of(method, 30, sampling, seed=7, **settings))


def test_a_drafter_is_given_to_load(folder):
    engine = load(folder, drafter=Sometimes())
    assert complete(engine, GREEDY, "naive").stats.levels[0].num_draft_tokens
    assert engine.models.drafter_name == "Sometimes"
    for wrong in ({"drafter": 5}, {"drafter": Sometimes(), "draft": "suffix"}):
        with pytest.raises(minitri.InputError, match="drafter"):
            minitri.load(str(folder), device="cpu", **wrong)


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_right_guesses_are_accepted(engine, distribution):
    """Certain ones, and ones with a distribution; it says nothing at the end of what it knows."""
    prompt = engine.tokenizer.encode(PROMPT)
    text = [*prompt, *complete(engine, distribution, "autoregressive").token_ids]

    class Prophet:
        def guess(self, tokens, row):
            if len(tokens) >= len(text):
                return None
            return text[len(tokens)] if len(tokens) % 2 else probs(*[0] * text[len(tokens)], 1)

    done = complete(with_drafter(engine, Prophet()), distribution, "naive", prompt)
    assert list(done.token_ids) == text[len(prompt) :]
    assert done.stats.levels[0].acceptance_rate == 1
    assert done.stats.levels[0].num_accepted_tokens > 20


def test_rows_of_a_batch_are_asked_each_for_itself(engine):
    asked = {}

    class Noting:
        def guess(self, tokens, row):
            asked.setdefault(row, set()).add(tokens[0])
            return tokens[-1]

    settings = settings_of("triforce", 30, WARM, gamma1=2, gamma2=3, budget=24)
    list(with_drafter(engine, Noting()).generate([[5, 9], [6], [7] * 30], **settings))
    assert asked == {0: {5}, 1: {6}, 2: {7}}


def probs(*values: float, size: int = 320) -> torch.Tensor:
    return torch.tensor([*map(float, values), *[0.0] * (size - len(values))])


WRONG_GUESSES = [-1, 320, 2**70, "token", 1.5, [0.5, 0.5], probs(1, size=321), probs(0.5)]
WRONG_GUESSES += [probs(1).unsqueeze(0), probs(1.5, -0.5), probs(math.nan), AttributeError("a\nb")]


@pytest.mark.parametrize("answer", WRONG_GUESSES, ids=repr)
def test_a_drafter_that_breaks_its_protocol_is_named(engine, answer):
    broken = type("Broken", (), {"guess": Mock(side_effect=[answer])})()
    with pytest.raises(minitri.InputError, match="^the drafter Broken [^\n]*$"):
        complete(with_drafter(engine, broken), GREEDY, "triforce")


def test_every_run_has_a_policy_of_its_own(engine):
    """Two runs at a time with one object; nothing of either stays in it."""
    policy = Weighted()
    settings = settings_of("retrieval", 30, gamma2=3, budget=24, policy=policy)
    alone = engine.complete(PROMPT, **settings)
    runs = [engine.generate(PROMPT, **settings) for _ in range(2)]
    *_, ends = zip(*runs, strict=True)
    assert [end.token_ids for end in ends] == [alone.token_ids] * 2
    policy.weight = "not for the runs before"
    with pytest.raises(minitri.InputError, match="policy Weighted"):
        engine.complete(PROMPT, **settings)
    assert not policy.seen


BROKEN = [("observe", ValueError("no")), ("reset", ValueError("a\nb"))]
BROKEN += [("scores", answer) for answer in (None, torch.zeros(2, 1), math.nan)]


@pytest.mark.parametrize(("method", "answer"), BROKEN, ids=repr)
def test_a_policy_that_breaks_its_protocol_is_named(engine, method, answer):
    def broken(self, *given):
        if isinstance(answer, Exception):
            raise answer
        return given[-1][:, :, 0, 0] * answer if isinstance(answer, float) else answer

    policy = type("Broken", (minitri.Policy,), {method: broken})()
    with pytest.raises(minitri.InputError, match="^the policy Broken [^\n]*$"):
        complete(engine, GREEDY, "triforce", policy=policy)
