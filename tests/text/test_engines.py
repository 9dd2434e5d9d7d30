"""Filters that look at the text, and log-probabilities, through the real engine."""

import dataclasses
import functools
import itertools

import llguidance
import pytest

import minitri
from minitri import GenerationConfig, Grammar, Request, SamplingParams, SpeculationConfig, Token
from tests.conftest import ends_of, texts_of, tiny_engine
from tests.core.rigs import fresh_read, random_prompt
from tests.strategies import GRAMMARS

METHODS = {
    "naive": {"method": "naive", "gamma1": 3},
    "triforce": {"method": "triforce", "gamma1": 2, "gamma2": 4, "budget": 32},
    "tree": {"method": "retrieval", "tree": "8", "budget": 32},
}
SHAPES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(logit_bias={7: 5.0, 30: -100}, min_tokens=9),
    SamplingParams(bad_words=["She", "e", " had been"], min_tokens=20),
    *(SamplingParams(grammar=grammar, presence_penalty=0.5) for grammar in GRAMMARS),
]


def requests_of(engine, temperature: float, num_new: int) -> list[Request]:
    """One for every kind of filter."""
    requests = []
    for b, params in enumerate([SamplingParams(), *SHAPES]):
        prompt = random_prompt(engine.config, 30 + 7 * b, seed=b)
        sampling = dataclasses.replace(params, temperature=temperature)
        requests.append(Request(prompt, b, sampling, max_new_tokens=num_new + b))
    return requests


@pytest.mark.parametrize(("dtype", "coupled"), [("float32", False), ("bfloat16", True)])
def test_a_row_is_filtered_by_its_own_text_whatever_its_neighbours_guess(folder, dtype, coupled):
    """Requests that come and go in two places, by chance; on compiled kernels, to the bit."""
    engine = minitri.load(folder, dtype=dtype, device="cpu")
    if not engine.model.execution.is_row_invariant:
        pytest.skip("no compiled kernels here")
    requests = requests_of(engine, 0.8 if coupled else 0, 10)
    plain = {"coupled": coupled, "method": "autoregressive"}
    alone = [texts_of(engine.stream([request], **plain))[0] for request in requests]
    for method, settings in METHODS.items():
        if (dtype, method) != ("bfloat16", "tree"):  # its order of slots decides last bits
            together = engine.stream(requests, batch_size=2, coupled=coupled, **settings)
            assert texts_of(together) == alone, method


def test_a_row_whose_grammar_gives_up_ends_alone_and_says_why(engine, monkeypatch):
    """A pattern with more states than the library may make is refused in the middle of the text."""
    limits = functools.partial(llguidance.LLParserLimits, step_lexer_fuel=300)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    exploding = SamplingParams(1.0, grammar=Grammar("regex", "(.*a){40}.*b.{200}c"))
    other = Request([5] * 9, 1, max_new_tokens=9)
    with engine.open(batch_size=2, generation=GenerationConfig(reserve=400)) as run:
        run.submit(Request([7] * 9, 1, exploding, max_new_tokens=200))
        run.submit(other)
        ends = ends_of(itertools.takewhile(lambda event: not isinstance(event, minitri.Idle), run))
    assert [ends[1].token_ids] == texts_of(engine.stream([other]))
    assert ends[0].finish_reason == "failed"
    assert "lexer error" in str(ends[0].error)


@pytest.mark.parametrize(("method", "tree"), [("naive", "3x2"), ("triforce", "")])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, 20, top_p=0.9)])
def test_log_probabilities_are_those_of_the_plain_forward_pass(sampling, method, tree):
    """The target's log-probabilities count, before temperature and filters, whoever guessed."""
    engine = tiny_engine(noise=0.05)
    prompt = random_prompt(engine.config, 50, seed=3)
    sizes = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16}
    run = engine.generate(
        [prompt, prompt[:31]],
        sampling=sampling,
        generation=GenerationConfig(24, ignore_eos=True, logprobs=4),
        speculation=SpeculationConfig(method, tree=tree, **sizes),
    )
    events = [event for event in run if isinstance(event, Token)]
    for row, text in enumerate((prompt, prompt[:31])):
        tokens = [event for event in events if event.row == row]
        logits_NV = fresh_read(engine.model, text + [token.token_id for token in tokens])[1]
        scores_NV = logits_NV.log_softmax(-1)[len(text) - 1 : -1]
        for token, scores_V in zip(tokens, scores_NV, strict=True):
            best = scores_V.topk(4)
            assert token.logprob == pytest.approx(float(scores_V[token.token_id]), abs=2e-5)
            ids, top = zip(*token.top_logprobs, strict=True)
            assert list(top) == pytest.approx(best.values.tolist(), abs=2e-5)
            assert list(ids) == best.indices.tolist()
