"""The self-test finds what is broken, and does not cry wolf over rounding."""

import itertools

import pytest
import torch

from minitri.apps.selftest import __main__ as selftest
from minitri.apps.selftest import comparisons
from minitri.apps.selftest.comparisons import scores
from minitri.core import runner
from minitri.core.decoding import random_source
from minitri.core.decoding.noise import gumbel_argmax, noise_keys
from minitri.core.decoding.sampling import probs_from_logits, probs_of_rows, sample
from minitri.core.decoding.verification import verify
from minitri.core.settings import SamplingParams
from tests.conftest import write_hf_folder


@pytest.fixture
def check(folder, call):
    """Runs the self-test on the tiny model; gives exit code, lines, and the report."""

    def run(flags: str = ""):
        always = "--dtype float32 --max-prompt-tokens 120 --max-new-tokens 40 --budget 32"
        words = f"--model {folder} {always} --num-samples 0 {flags}".split()
        done = call(selftest.main, *words, "--json")
        assert len(done.out.splitlines()) == 1
        return done.code, selftest.table(done.json["comparisons"]).splitlines()[1:], done.json

    return run


@pytest.fixture(scope="module")
def adversary(tmp_path_factory):
    """A drafter that guesses badly."""
    return write_hf_folder(tmp_path_factory.mktemp("drafter") / "other", seed=1)


@pytest.fixture
def check_samples(check, adversary):
    """Runs the statistical test with an adversarial drafter; exit code, objects by method."""

    def run(flags: str):
        code, _, report = check(f"--draft {adversary} --num-samples 2000 {flags}")
        rows = [row for row in report["comparisons"] if row["mode"] == "sampled"]
        return code, {row["method"]: row for row in rows}

    return run


def test_sound_code_passes_with_every_method_and_both_modes(check):
    code, lines, report = check()
    assert code == 0
    pairs = itertools.product(("greedy", "coupled"), ("naive", "retrieval", "triforce"))
    assert [line.split()[:3] for line in lines[:6]] == [[*pair, "equal"] for pair in pairs]
    assert lines[6:] == ["", "speculation changes nothing: 6 equal"]
    assert all(row["num_equal_tokens"] == row["num_tokens"] == 40 for row in report["comparisons"])


def test_a_coupled_draw_with_the_noise_of_another_position_is_a_bug(check, monkeypatch):
    sound = random_source.CoupledSource.verify

    def shifted(self, proposal, probs_BNV, starts, active):
        starts = [start + (probs_BNV.shape[1] > 1) for start in starts]
        return sound(self, proposal, probs_BNV, starts, active)

    monkeypatch.setattr(random_source.CoupledSource, "verify", shifted)
    code, lines, _ = check("--method retrieval")
    assert (code, lines[1].split()[:3]) == (1, ["coupled", "retrieval", "BUG"])
    assert lines[-1] == "speculation changes texts, which is a bug: 1 equal, 1 BUG"


def swap_top_two(monkeypatch, low: float, high: float):
    """Where positions are read together, the two best logits change places over such gaps."""

    def broken(logits_BNV, *others):
        best = logits_BNV.topk(2)
        gap_BN1 = best.values[..., :1] - best.values[..., 1:]
        is_swapped_BN1 = (gap_BN1 >= low) & (gap_BN1 < high) & (logits_BNV.shape[1] > 1)
        swapped_BNV = logits_BNV.scatter(2, best.indices, best.values.flip(2))
        return probs_of_rows(swapped_BNV.where(is_swapped_BN1, logits_BNV), *others)

    monkeypatch.setattr(runner, "probs_of_rows", broken)


@pytest.mark.parametrize(
    ("gaps", "flags", "is_bitwise", "verdict"),
    [
        ((0.0, 0.05), "--dtype bfloat16 --max-new-tokens 300", False, "tie"),
        ((0.0, 0.05), "--dtype bfloat16 --max-new-tokens 300", True, "BUG"),
        ((1e-3, 0.05), "--max-new-tokens 300", False, "BUG"),
        ((1.0, 9.0), "--dtype bfloat16", False, "BUG"),
    ],
)
def test_a_flip_is_a_tie_only_where_rounding_explains_it(
    check, monkeypatch, gaps, flags, is_bitwise, verdict
):
    monkeypatch.setattr(comparisons, "is_bitwise", lambda *_: is_bitwise)
    swap_top_two(monkeypatch, *gaps)
    code, _, report = check(f"--method naive {flags}")
    greedy = report["comparisons"][0]
    assert (code, greedy["verdict"]) == (verdict == "BUG", verdict)
    assert (greedy["score_gap"] <= greedy["bound"]) == (verdict != "BUG" or is_bitwise)
    assert greedy["bound"] < (1 if "bfloat16" in flags else 1e-4)


def test_the_scores_are_what_decoding_takes_the_argmax_of():
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for temperature, position in itertools.product((0.3, 0.8, 2.0), range(20)):
        probs_1V = probs_from_logits(logits_V.unsqueeze(0), SamplingParams(temperature))
        drawn = gumbel_argmax(probs_1V, noise_keys(5, torch.tensor([position])))
        assert int(scores(logits_V, temperature, 5, position).argmax()) == int(drawn)


@pytest.mark.parametrize(
    ("flags", "methods"),
    [
        ("--top-p 0.95 --temperature 1.2", ["naive", "retrieval", "triforce"]),
        ("--top-k 1 --method naive --seed 4294967295", ["naive"]),  # without variance
    ],
)
@pytest.mark.slow
def test_sound_samples_are_consistent(check_samples, flags, methods):
    code, rows = check_samples(flags)
    assert (code, [*rows]) == (0, methods)
    assert {row["verdict"] for row in rows.values()} == {"consistent"}
    assert min(row["least_p_value"] for row in rows.values()) > 1e-3


def resample_from_p(p_BNV, uniforms_BN, guesses):
    """A rejected guess is replaced by a sample from p itself, as in the published TriForce code."""
    verdict = verify(p_BNV, uniforms_BN, guesses)
    p_BV = p_BNV[range(len(p_BNV)), verdict.num_accepted_B]
    return verdict._replace(next_B=sample(p_BV, uniforms_BN[:, -1]))


def test_samples_of_a_broken_verification_are_a_bug(check_samples, monkeypatch):
    monkeypatch.setattr(random_source, "verify_block", resample_from_p)
    code, rows = check_samples("--method naive")
    assert code == 1
    assert {row["verdict"] for row in rows.values()} == {"BUG"}


def test_an_alarm_that_may_be_rounding_is_unclear(check_samples, monkeypatch):
    monkeypatch.setattr(comparisons, "is_bitwise", lambda *_: False)
    monkeypatch.setattr(random_source, "verify_block", resample_from_p)
    code, rows = check_samples("--method naive --dtype bfloat16")
    assert (code, rows["naive"]["verdict"]) == (1, "unclear")
