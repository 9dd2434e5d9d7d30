"""Log-probabilities are the target's own at every place, whoever guessed the token."""

import pytest

from minitri import GenerationConfig, SamplingParams, SpeculationConfig, Token
from tests.cascades import tiny_engine
from tests.core.rigs import fresh_read, random_prompt

SETTINGS = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16, "coupled": True}


def tokens_of(engine, prompt, method, sampling, tree=""):
    """Tokens after a prompt and after its beginning, one row after the other."""
    engine.release()
    settings = {
        "sampling": sampling,
        "speculation": SpeculationConfig(method, tree=tree, **SETTINGS),
    }
    settings["generation"] = GenerationConfig(24, ignore_eos=True, logprobs=4)
    run = engine.generate([prompt, prompt[:31]], seed=0, **settings)
    return sorted((event for event in run if isinstance(event, Token)), key=lambda token: token.row)


@pytest.mark.parametrize(
    ("method", "tree"), [("naive", "3x2"), ("triforce", ""), ("triforce", "3x2")]
)
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, 20, top_p=0.9)])
def test_they_are_those_of_autoregressive_decoding(sampling, method, tree):
    engine = tiny_engine(noise=0.05)
    prompt = random_prompt(engine.config, 50, seed=3)
    plain = tokens_of(engine, prompt, "autoregressive", sampling)
    for one, other in zip(tokens_of(engine, prompt, method, sampling, tree), plain, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
        top = [score for _, score in other.top_logprobs]
        assert [score for _, score in one.top_logprobs] == pytest.approx(top, abs=2e-5)


def test_they_are_those_of_the_plain_forward_pass():
    """Before temperature and filters, of a token in its own context."""
    engine = tiny_engine()
    prompt = random_prompt(engine.config, 40, seed=3)
    tokens = tokens_of(engine, prompt, "triforce", SamplingParams(0.8, 5))[:24]
    text = prompt + [token.token_id for token in tokens]
    scores = fresh_read(engine.model, text)[1].log_softmax(-1)
    for place, token in enumerate(tokens, len(prompt) - 1):
        best = scores[place].topk(4)
        assert token.logprob == pytest.approx(float(scores[place, token.token_id]), abs=2e-5)
        ids, top = zip(*token.top_logprobs, strict=True)
        assert list(top) == pytest.approx(best.values.tolist(), abs=2e-5)
        assert list(ids) == best.indices.tolist()
