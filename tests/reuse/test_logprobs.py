"""Log-probabilities are the target's own at every place, whoever guessed the token."""

import pytest
import torch

from minitri import GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig, Token
from minitri.settings import METHODS
from tests.cascades import random_prompt, tiny_engine

SETTINGS = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16}


def tokens_of(engine, prompts, method, sampling, num_top, tree="", seed=0):
    engine.release()
    speculation = SpeculationConfig(method, tree=tree, coupled=True, **SETTINGS)
    generation = GenerationConfig(24, ignore_eos=True, logprobs=num_top)
    run = engine.generate(
        prompts, sampling=sampling, generation=generation, speculation=speculation, seed=seed
    )
    rows = [[] for _ in prompts]
    for event in run:
        if isinstance(event, Token):
            rows[event.row].append(event)
    return rows


@pytest.mark.parametrize("tree", ["", "3x2"])
@pytest.mark.parametrize("method", [it for it in METHODS if it != "auto"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, 20, top_p=0.9)])
def test_they_are_those_of_autoregressive_decoding(sampling, method, tree):
    if tree and method == "autoregressive":
        pytest.skip("guesses nothing")
    engine = tiny_engine(noise=0.05)
    prompts = [random_prompt(engine.config, 50, seed=3), random_prompt(engine.config, 31, seed=4)]
    plain = tokens_of(engine, prompts, "autoregressive", sampling, 4)
    guessed = tokens_of(engine, prompts, method, sampling, 4, tree)
    for ours, theirs in zip(guessed, plain, strict=True):
        assert [it.token_id for it in ours] == [it.token_id for it in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert len(one.top_logprobs) == 4
            pairs = zip(one.top_logprobs, other.top_logprobs, strict=True)
            assert all(a[1] == pytest.approx(b[1], abs=2e-5) for a, b in pairs)


def test_they_are_those_of_the_plain_forward_pass():
    """Before temperature and filters, of a token in its own context."""
    engine = tiny_engine()
    prompt = random_prompt(engine.config, 40, seed=3)
    [tokens] = tokens_of(engine, [prompt], "triforce", SamplingParams(0.8, 5), 3)
    text = prompt + [token.token_id for token in tokens]
    with torch.inference_mode():
        from minitri.caches.full import FullCache

        model = engine.model
        cache = FullCache.allocate(model.config, 1, 100, dtype=model.dtype, device=model.device)
        hidden = model.forward(torch.tensor([text]), torch.arange(len(text)).unsqueeze(0), cache)
        scores = model.logits(hidden)[0].log_softmax(-1)
    for place, token in enumerate(tokens, len(prompt) - 1):
        best = scores[place].topk(3)
        assert token.logprob == pytest.approx(float(scores[place, token.token_id]), abs=2e-5)
        assert [score for _, score in token.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=2e-5
        )
        assert [number for number, _ in token.top_logprobs] == best.indices.tolist()


def test_none_are_given_unless_asked_for():
    engine = tiny_engine()
    [tokens] = tokens_of(engine, [[5, 6]], "triforce", SamplingParams(), None)
    assert {(token.logprob, token.top_logprobs) for token in tokens} == {(None, ())}
    [tokens] = tokens_of(engine, [[5, 6]], "triforce", SamplingParams(), 0)
    assert all(token.logprob < 0 and token.top_logprobs == () for token in tokens)


def test_rows_may_ask_for_different_numbers():
    engine = tiny_engine()
    wanted = [
        Request([5, n], generation=GenerationConfig(6, ignore_eos=True, logprobs=n))
        for n in (None, 2, 5)
    ]
    for event in engine.stream([*wanted[1:], Request([7, 7])]):
        if isinstance(event, Token):
            assert len(event.top_logprobs) == (2, 5, 0)[event.row]


@pytest.mark.parametrize("number", [-1, 21, 2.5, True])
def test_a_wrong_number_is_refused(number):
    with pytest.raises(InputError, match="logprobs"):
        GenerationConfig(logprobs=number)
