"""The self-test finds what is broken, and does not cry wolf over rounding."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from minitri.cli.boot import load_engine
from minitri.decoding import random_source, sampling
from minitri.decoding.noise import gumbel_argmax, noise_key
from minitri.decoding.sampling import probs_from_logits, sample
from minitri.decoding.verification import verify
from minitri.execution import Execution
from minitri.selftest import __main__ as selftest
from minitri.selftest.departures import modes
from minitri.settings import SamplingParams
from tests.chi_square import reuse_number
from tests.conftest import write_hf_folder


@pytest.fixture
def check(folder, capsys):
    """Runs the self-test on the tiny model; gives exit code, lines of standard output and standard
    error."""

    def run(*flags: str):
        with pytest.raises(SystemExit) as ended:
            selftest.main(["--model", str(folder), "--dtype", "float32", "--max-prompt-tokens",
                "120",
                           "--max-new-tokens", "40", "--budget", "32", "--num-samples", "0",
                           *flags])  # fmt: skip
        captured = capsys.readouterr()
        return ended.value.code, captured.out.splitlines(), captured.err

    return run


def swap_top_two(monkeypatch, low: float, high: float):
    """Where several positions are read at once, the two best logits change places if their gap is
    in this range."""

    def broken(logits_NV, params, *numbers_3):
        best = logits_NV.topk(2)
        gap_N1 = best.values[:, :1] - best.values[:, 1:]
        is_swapped_N1 = (gap_N1 >= low) & (gap_N1 < high) & torch.tensor(len(logits_NV) > 1)
        swapped_NV = logits_NV.scatter(1, best.indices, best.values.flip(1))
        return probs_from_logits(swapped_NV.where(is_swapped_N1, logits_NV), params, *numbers_3)

    monkeypatch.setattr(sampling, "probs_from_logits", broken)


def test_sound_code_passes_with_every_method_and_both_modes(check):
    code, lines, err = check()
    report = json.loads(lines[-1])
    assert code == 0
    assert [line.split()[:3] for line in lines[:6]] == [
        [mode, method, "equal:"]
        for mode in ("greedy", "coupled")
        for method in selftest.METHODS[2:]
    ]
    assert lines[6] == "6 comparisons: 6 equal, 0 numeric ties, 0 consistent, 0 bugs"
    assert (report["num_equal"], report["num_ties"], report["num_bugs"]) == (6, 0, 0)
    assert all(row["num_equal_tokens"] == row["num_tokens"] == 40 for row in report["comparisons"])
    assert "greedy, autoregressive: 40 tokens behind 120 ..." in err


def test_a_verification_that_accepts_everything_is_a_bug(check, monkeypatch):
    def accept_all(proposal, probs_BNV, uniforms_BN):
        sound = verify(proposal, probs_BNV, uniforms_BN)
        return replace(sound, num_accepted=proposal.counts)

    monkeypatch.setattr(random_source, "verify_block", accept_all)
    code, lines, _ = check("--method", "naive")
    report = json.loads(lines[-1])
    assert code == 1
    assert lines[0].startswith("greedy   naive      BUG: ")
    assert "top-2 logit gap" in lines[0]
    assert lines[-2].endswith("please report the lines that say BUG")
    greedy, coupled = report["comparisons"]
    assert coupled["verdict"] == "equal"  # its decision is another function
    assert greedy["verdict"] == "BUG"
    assert greedy["num_equal_tokens"] < 40
    assert greedy["position"] == 120 + greedy["num_equal_tokens"]
    assert greedy["score_gap"] > greedy["bound"]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """A drafter whose favourites are not the target's."""
    return write_hf_folder(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def check_samples(check, other_folder):
    """Runs the statistical test alone worth looking at: its objects, by method."""

    def run(*flags: str):
        code, lines, _ = check("--draft", str(other_folder), "--num-samples", "2000", *flags)
        results = json.loads(lines[-1])["comparisons"]
        return code, {row["method"]: row for row in results if row["mode"] == "sampled"}

    return run


def test_sound_samples_are_consistent_with_filters_too(check_samples):
    code, found = check_samples("--top-p", "0.95", "--temperature", "1.2")
    assert code == 0
    assert [*found] == ["naive", "retrieval", "triforce"]
    assert {row["verdict"] for row in found.values()} == {"consistent"}
    assert all(row["num_tokens"] == 2048 for row in found.values())
    assert min(min(row["p_values"].values()) for row in found.values()) > 1e-3


@pytest.mark.parametrize(
    "flags", [("--top-k", "1"), ("--dtype", "bfloat16", "--top-p", "0.1", "--temperature", "0.3")]
)
def test_distributions_without_variance_or_rounded_ones_are_no_bug(check_samples, flags):
    """Nothing to test, or an alarm in bfloat16 that float32 does not confirm."""
    code, found = check_samples(*flags, "--method", "naive", "--seed", "4294967295")
    assert code == 0
    assert found["naive"]["verdict"] == "consistent"


def resample_from_p(proposal, probs_BNV, uniforms_BN):
    """The published TriForce code: a rejected guess is replaced by a sample from p itself."""
    verdict = verify(proposal, probs_BNV, uniforms_BN)
    rows = torch.arange(len(probs_BNV))
    drawn = sample(probs_BNV[rows, torch.tensor(verdict.num_accepted)], uniforms_BN[:, -1])
    return replace(verdict, next_tokens=drawn.tolist())


@pytest.mark.parametrize("broken", [resample_from_p, reuse_number])
def test_samples_of_a_broken_verification_are_a_bug(check_samples, monkeypatch, broken):
    monkeypatch.setattr(random_source, "verify_block", broken)
    code, found = check_samples("--method", "naive", "--method", "triforce")
    assert code == 1
    assert {row["verdict"] for row in found.values()} == {"BUG"}


def test_a_coupled_draw_with_the_noise_of_another_position_is_a_bug(check, monkeypatch):
    other_key = lambda seed, position: noise_key(seed, position - position % 2)  # noqa: E731
    monkeypatch.setattr(random_source, "noise_key", other_key)
    code, lines, _ = check("--method", "retrieval")
    assert code == 0, "all methods agree on the wrong noise"
    monkeypatch.undo()
    sound = random_source.CoupledSource.verify

    def shifted(self, proposal, probs_BNV, starts, active):
        return sound(
            self,
            proposal,
            probs_BNV,
            [start + (probs_BNV.shape[1] > 1) for start in starts],
            active,
        )

    monkeypatch.setattr(random_source.CoupledSource, "verify", shifted)
    code, lines, _ = check("--method", "retrieval")
    assert code == 1
    assert lines[1].startswith("coupled  retrieval  BUG: ")


def loading(*, is_row_invariant):
    """`load_engine`, whose models are said to have these kernels."""

    def load(*args, **settings):
        engine, prompts = load_engine(*args, **settings)
        engine.model.execution = Execution(is_row_invariant=is_row_invariant)
        return engine, prompts

    return load


@pytest.mark.parametrize("is_row_invariant", [False, True])
def test_a_flip_that_rounding_explains_is_a_numeric_tie_unless_bits_never_change(
    check, monkeypatch, is_row_invariant
):
    monkeypatch.setattr(selftest, "load_engine", loading(is_row_invariant=is_row_invariant))
    swap_top_two(monkeypatch, 0.0, 0.05)
    code, lines, err = check("--method", "naive", "--dtype", "bfloat16", "--max-new-tokens", "300")
    greedy = json.loads(lines[-1])["comparisons"][0]
    assert code == is_row_invariant
    if is_row_invariant:
        assert greedy["verdict"] == "BUG"
        return
    assert lines[0].startswith("greedy   naive      numeric tie: ")
    assert greedy["score_gap"] <= greedy["bound"] < 1
    assert "loading the model in float32" in err


def test_the_same_flip_in_float32_is_a_bug(check, monkeypatch):
    swap_top_two(monkeypatch, 1e-3, 0.05)
    code, lines, _ = check("--method", "naive", "--max-new-tokens", "300")
    greedy = json.loads(lines[-1])["comparisons"][0]
    assert (code, greedy["verdict"]) == (1, "BUG")
    assert greedy["bound"] < 1e-4


def test_a_flip_too_wide_for_bfloat16_is_a_bug(check, monkeypatch):
    swap_top_two(monkeypatch, 1.0, 9.0)
    code, lines, _ = check("--method", "naive", "--dtype", "bfloat16")
    greedy = json.loads(lines[-1])["comparisons"][0]
    assert (code, greedy["verdict"]) == (1, "BUG")
    assert greedy["score_gap"] > 0.9


def test_the_scores_are_what_decoding_takes_the_argmax_of():
    logits_V = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for temperature in (0.3, 0.8, 2.0):
        coupled = modes(temperature)[1]
        probs_1V = probs_from_logits(logits_V.unsqueeze(0), SamplingParams(temperature))
        for position in range(20):
            drawn = gumbel_argmax(probs_1V, torch.tensor([noise_key(5, position)]))
            assert int(coupled.scores(logits_V, 5, position).argmax()) == int(drawn)


BAD_FLAGS = {
    "autoregressive is the reference": (
        ["--method", "autoregressive"],
        "invalid choice: 'autoregressive'",
    ),
    "no drafter": (["--draft", "none"], "needs a drafter, got --draft none"),
    "cold": (["--temperature", "-1"], "temperature is -1.0"),
    "no new tokens": (["--max-new-tokens", "0"], "max_new_tokens is 0"),
    "no guesses": (["--gamma2", "0"], "gamma2 is 0"),
    "odd budget": (["--budget", "33"], "budget is 33 tokens"),
    "no such file": (["--prompt-file", "/nowhere/x.txt"], "cannot read the prompt"),
    "too long": (["--max-prompt-tokens", "600"], "holds 512 minus max_new_tokens=40"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(check, case):
    flags, message = BAD_FLAGS[case]
    code, lines, err = check("--quiet", *flags)
    assert (code, lines) == (2, [])
    assert err.count("\n") == 1
    assert message in err
