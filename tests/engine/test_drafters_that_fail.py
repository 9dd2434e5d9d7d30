"""Logits that are not finite end a run, or in one that stays open their row, with one line that
names the models."""

import itertools

import pytest
import torch

from minitri import GenerationConfig, Idle, Request, SpeculationConfig
from minitri.core import generation, prefill
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.errors import FaultError
from tests.conftest import ends_of, tiny_engine
from tests.core.rigs import WARM

SICK = 101
"""A token that is not finite in a damaged model."""
SIZES = {"budget": 32, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 4}


def texts(run, prompts, logprobs=(None,) * 4) -> list[object]:
    """What an open run gives for prompts at once: tokens, or what went wrong."""
    for prompt, num in zip(prompts, logprobs, strict=False):
        run.submit(Request(prompt, 3, WARM, GenerationConfig(8, ignore_eos=True, logprobs=num)))
    ends = ends_of(itertools.takewhile(lambda event: not isinstance(event, Idle), run))
    return [end.error or end.token_ids for end in ends]


@pytest.mark.parametrize(
    ("method", "tree", "damaged"),
    [
        ("autoregressive", "", "model"),
        ("retrieval", "4", "model"),
        ("triforce", "", "draft"),
        ("naive", "4", "draft"),
    ],
)
def test_one_row_of_four_fails_alone_and_leaves_nothing(method, tree, damaged):
    coupled = method in ("autoregressive", "naive")
    with tiny_engine() as engine:
        sound = [[5, 6, 7], [8, *range(20, 50)], [9, 10]]
        sick = [*range(60, 80), SICK, 11, 12]
        speculation = SpeculationConfig(method, tree=tree, coupled=coupled, **SIZES)
        with engine.open(batch_size=4, reserve=200, speculation=speculation) as run:
            alone = [texts(run, [prompt])[0] for prompt in (*sound, sick)]
        assert all(SICK not in text for text in alone[:3])
        model = engine.models.draft if damaged == "draft" else engine.model
        weight = model.embed_tokens.weight[SICK].clone()
        engine.release()
        with engine.open(batch_size=4, reserve=200, speculation=speculation) as run:
            model.embed_tokens.weight[SICK] = torch.nan
            for place in (0, 3):
                found = texts(run, [*sound[:place], sick, *sound[place:]])
                error = found.pop(place)
                assert isinstance(error, FaultError)
                assert f"{engine.config.name} computed logits that are not finite" in str(error)
                assert found == alone[:3]
            model.embed_tokens.weight[SICK] = weight
            assert texts(run, [sick]) == [alone[3]]


SHORT = {  # what fails, and when
    "a prompt": (prefill, "read_block", lambda model, blocks, cache, *_: cache.lengths[0] > 40),
    "scores": (generation, "log_probs", lambda logits_NV, tokens, num_top: num_top == 5),
    "a rebuild": (RetrievalCache, "commit", lambda cache, b, _: cache.num_tokens[b] > 90),
}


@pytest.mark.parametrize("what", SHORT)
def test_a_row_for_which_memory_is_short_fails_alone(what, monkeypatch):
    """The other goes on, and what had been read of it is kept."""
    owner, name, is_short = SHORT[what]
    function = getattr(owner, name)

    def call(*given, **named):
        if is_short(*given):
            raise RuntimeError("ALLOC_FAILED" if what == "scores" else "can't allocate memory")
        return function(*given, **named)

    how = {"prefill_chunk": 16, "method": "retrieval", "coupled": True, **SIZES}
    with tiny_engine() as engine, engine.open(batch_size=2, reserve=200, **how) as run:
        sound, large = [5, 6, 7], [*range(60, 160)]
        alone = texts(run, [sound])
        with monkeypatch.context() as patching:
            patching.setattr(owner, name, call)
            text, error = texts(run, [sound, large], logprobs=[None, 5])
        assert [text] == alone
        assert isinstance(error, FaultError)
        assert "cpu has run out of memory" in str(error)
        num_read = run.stats.num_prefilled_tokens
        assert len(texts(run, [large])[0]) == 8
        assert run.stats.num_prefilled_tokens - num_read < 60
