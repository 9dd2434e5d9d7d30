"""Logits that are not finite end a run, or in one that stays open their row, with one line that
names the models."""

import pytest
import torch

from minitri import GenerationConfig, Request, SpeculationConfig
from minitri.core import stack
from minitri.core.errors import FaultError
from tests.cascades import ends_of, tiny_engine
from tests.core.rigs import WARM

SICK = 101
"""A token that is not finite in a damaged model."""
SIZES = {"budget": 32, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 4}


def texts(run, prompts) -> dict[int, object]:
    """What an open run gives for prompts at once: tokens, or what went wrong."""
    generation = GenerationConfig(8, ignore_eos=True)
    numbers = [run.submit(Request(prompt, 3, WARM, generation)) for prompt in prompts]
    events = []
    while len(ends_of(events)) < len(prompts):
        events.append(next(run))
    ends = {end.row: end.error or end.token_ids for end in ends_of(events)}
    return [ends[number] for number in numbers]


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
                assert "computed logits that are not finite" in str(error)
                assert found == alone[:3]
            model.embed_tokens.weight[SICK] = weight
            assert texts(run, [sick]) == [alone[3]]


def test_a_prompt_for_which_memory_is_short_fails_alone(monkeypatch):
    """The others go on, and what had been read of it is kept."""
    with (
        tiny_engine() as engine,
        engine.open(batch_size=2, reserve=200, prefill_chunk=16, method="autoregressive") as run,
    ):
        sound, large = [5, 6, 7], [*range(60, 160)]
        alone = texts(run, [sound])
        read_chunk = stack.read_chunk

        def fail(model, prompt, full, b, *rest):
            if full.lengths[b] > 40:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return read_chunk(model, prompt, full, b, *rest)

        with monkeypatch.context() as patching:
            patching.setattr(stack, "read_chunk", fail)
            text, error = texts(run, [sound, large])
        assert [text] == alone
        assert isinstance(error, FaultError)
        assert "cpu has run out of memory" in str(error)
        number = run.submit(Request(large, generation=GenerationConfig(1)))
        ends = []
        while not ends:
            ends = ends_of([next(run)])
        assert (ends[0].row, ends[0].error) == (number, None)
        assert ends[0].row_stats.num_cached_tokens > 40


@pytest.mark.parametrize("damaged", ["model", "draft"])
def test_a_run_of_its_own_ends_and_names_the_damaged_model(damaged):
    engine = tiny_engine()
    model = engine.models.draft if damaged == "draft" else engine.model
    model.norm.weight[-1] = torch.nan
    object.__setattr__(model.config, "name", "the-damaged-one")
    with pytest.raises(FaultError, match="^the-damaged-one computed logits.*dtype=float32"):
        engine.complete([5, 6, 7], method="triforce", max_new_tokens=20, ignore_eos=True)
