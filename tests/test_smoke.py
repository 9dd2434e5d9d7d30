"""What must hold before anything else is worth a test: everything imports, every method agrees."""

import importlib
import pkgutil

import pytest

import minitri
from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig

PROMPTS = [[5, 6, 7], list(range(10, 60))]
LIMIT = GenerationConfig(max_new_tokens=16, ignore_eos=True)
SIZES = {"gamma1": 2, "gamma2": 4, "budget": 24, "num_recent_tokens": 8}
NEEDED_ELSEWHERE = ("triton", "gguf", "matplotlib", "prompt_toolkit")


def texts(run) -> list[tuple[int, ...]]:
    ends = (event for event in run if isinstance(event, End))
    return [end.token_ids for end in sorted(ends, key=lambda end: end.row)]


def test_every_module_can_be_imported():
    for module in pkgutil.walk_packages(minitri.__path__, "minitri."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                if (error.name or "").split(".")[0] not in NEEDED_ELSEWHERE:
                    raise


@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
def test_every_method_gives_the_autoregressive_text(engine, coupled):
    settings = {"generation": LIMIT, "sampling": SamplingParams(0.9 * coupled), "seed": 3}

    def text_by(method):
        speculation = SpeculationConfig(method, coupled=coupled, **SIZES)
        return texts(engine.generate(PROMPTS, speculation=speculation, **settings))

    wanted = text_by("autoregressive")
    assert [text_by(method) for method in ("naive", "retrieval", "triforce")] == [wanted] * 3
