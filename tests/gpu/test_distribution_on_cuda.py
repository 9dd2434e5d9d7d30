"""The default mode, independent random numbers at a temperature above 0, samples from the model's
distribution on a CUDA device, through captured steps and the verification that runs there."""

import pytest
import torch

import minitri
from minitri import SamplingParams, SpeculationConfig
from minitri.apps.selftest.comparisons import is_alarm, run_test, windows
from minitri.core.decoding import random_source
from minitri.core.decoding.sampling import sample
from minitri.core.decoding.verification import verify
from tests.conftest import write_hf_folder

SAMPLING = SamplingParams(1.2, top_p=0.95)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    """With a drafter whose favourites are not the target's."""
    draft = write_hf_folder(tmp_path_factory.mktemp("models") / "other", seed=1)
    return minitri.load(folder, draft=draft, dtype="bfloat16", device="cuda")


def run(engine, method):
    text = engine.tokenizer.encode("She had been forced into prudence in her youth. " * 20)
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=60)
    return run_test(engine, windows(text, 64, 64), SAMPLING, speculation, num_new=64, seed=0)


@pytest.mark.takes(seconds=60, gib=2)
@pytest.mark.parametrize("method", ["naive", "retrieval", "triforce"])
def test_samples_follow_the_distribution(engine, method):
    """False alarm: odds of at most 1 in 10,000, and the seeds are fixed."""
    p_values = run(engine, method)
    assert not is_alarm(p_values, 3), p_values


@pytest.mark.takes(seconds=60, gib=2)
def test_a_wrong_verification_on_the_device_is_noticed(engine, monkeypatch):
    """A rejected guess is replaced by a sample from p itself, not from the residual."""

    def resample_from_p(p_BNV, uniforms_BN, guesses):
        verdict = verify(p_BNV, uniforms_BN, guesses)
        rows = torch.arange(len(p_BNV), device=p_BNV.device)
        p_BV = p_BNV[rows, verdict.num_accepted_B]
        return verdict._replace(next_B=sample(p_BV, uniforms_BN[:, -1]))

    monkeypatch.setattr(random_source, "verify_block", resample_from_p)
    assert is_alarm(run(engine, "naive"), 3)
