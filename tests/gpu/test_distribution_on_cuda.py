"""Independent samples at a temperature above 0 follow the model's distribution on a CUDA device."""

import pytest

import minitri
from minitri import SamplingParams, SpeculationConfig
from minitri.apps.selftest.comparisons import is_alarm, run_test, windows
from tests.conftest import write_hf_folder

SAMPLING = SamplingParams(1.2, top_p=0.95)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """An engine with a drafter whose favourites are not the target's."""
    draft = write_hf_folder(tmp_path_factory.mktemp("models") / "other", seed=1)
    return minitri.load(folder, draft=draft, dtype="bfloat16", device="cuda")


@pytest.mark.takes(seconds=60, gib=2)
@pytest.mark.parametrize("method", ["naive", "retrieval", "triforce"])
def test_samples_follow_the_distribution(engine, method):
    """False alarm: odds of at most 1 in 10,000, and the seeds are fixed."""
    text = engine.tokenizer.encode("She had been forced into prudence in her youth. " * 20)
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=60)
    prompts = windows(text, 64, 64)
    p_values = run_test(engine, prompts, SAMPLING, speculation, num_new=64, seed=0)
    assert not is_alarm(p_values, 3), p_values
