"""The self-test finds what is broken, and does not cry wolf over rounding."""

import pytest

from minitri.apps.selftest import comparisons
from minitri.apps.selftest import selftesting as selftest
from minitri.core import runner
from minitri.core.decoding import random_source
from minitri.core.decoding.sampling import probs_of_rows, sample
from minitri.core.decoding.verification import verify
from minitri.devices import choose
from tests.conftest import write_hf_folder


@pytest.fixture
def check(folder, call):
    """Runs the self-test on the tiny model; gives exit code and report."""

    def run(flags: str):
        always = "--dtype float32 --max-prompt-tokens 120 --max-new-tokens 40 --budget 32"
        words = f"--model {folder} {always} --num-samples 0 {flags} --json"
        done = call(selftest.main, *words.split())
        assert done.out.count("\n") == 1
        return done.code, done.json

    return run


@pytest.fixture
def check_samples(check, tmp_path):
    """Runs the statistical test with an adversarial drafter; exit code, its rows."""
    other = write_hf_folder(tmp_path / "other", seed=1)

    def run(flags: str):
        code, report = check(f"--draft {other} --max-new-tokens 1 {flags}")
        return code, [row for row in report["comparisons"] if row["mode"] == "sampled"]

    return run


def test_sound_code_passes_with_every_method_and_both_modes(check):
    code, report = check("")
    rows = report["comparisons"]
    assert (code, report["num_equal"]) == (0, 6)
    assert [(row["mode"], row["method"]) for row in rows] == [
        (mode, method)
        for mode in ("greedy", "coupled")
        for method in ("naive", "retrieval", "triforce")
    ]
    assert all(row["num_equal_tokens"] == row["num_tokens"] == 40 for row in rows)
    assert selftest.table(rows).endswith("\n\nspeculation changes nothing: 6 equal")


def test_its_text_is_as_long_as_a_small_model_holds(folder, call):
    words = f"--model {folder} --dtype float32 -n 8 --num-samples 0 --method naive --json"
    done = call(selftest.main, *words.split())
    assert (done.code, done.json["num_prompt_tokens"]) == (0, 504)


def accept_all(p_BNV, uniforms_BN, guesses):
    verdict = verify(p_BNV, uniforms_BN, guesses)
    return verdict._replace(num_accepted_B=guesses.counts_B)


SOUND = random_source.CoupledSource.numbers


def shifted(self, counts, starts, active):
    """The noise of another position, where positions are read together."""
    return SOUND(self, counts, [start + (max(counts) > 0) for start in starts], active)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "verdicts"),
    [
        (random_source, "verify_block", accept_all, ["BUG", "equal"]),
        (random_source.CoupledSource, "numbers", shifted, ["equal", "BUG"]),
    ],
)
def test_broken_code_is_a_bug_in_the_mode_that_runs_it(
    check, monkeypatch, owner, name, broken, verdicts
):
    monkeypatch.setattr(owner, name, broken)
    code, report = check("--method retrieval")
    rows = report["comparisons"]
    assert (code, report["num_BUG"]) == (1, 1)
    assert [row["verdict"] for row in rows] == verdicts
    bug = rows[verdicts.index("BUG")]
    assert bug["num_equal_tokens"] < 40
    assert bug["score_gap"] > bug["bound"]
    conclusion = "speculation changes texts, which is a bug: 1 equal, 1 BUG"
    assert selftest.table(rows).endswith(conclusion)


@pytest.mark.parametrize(
    ("gaps", "flags", "is_bitwise", "verdict"),
    [
        ((0.0, 0.05), "--dtype bfloat16", False, "tie"),
        ((0.0, 0.05), "--dtype bfloat16", True, "BUG"),
        ((1e-3, 0.05), "", False, "BUG"),
        ((1.0, 9.0), "--dtype bfloat16", False, "BUG"),
    ],
)
def test_a_flip_is_a_tie_only_where_rounding_explains_it(
    check, monkeypatch, gaps, flags, is_bitwise, verdict
):
    """The two best logits change places over such gaps, where positions are read together."""

    def swap_top_two(logits_BNV, *others):
        best = logits_BNV.topk(2)
        gap_BN1 = best.values[..., :1] - best.values[..., 1:]
        is_swapped_BN1 = (gap_BN1 >= gaps[0]) & (gap_BN1 < gaps[1]) & (logits_BNV.shape[1] > 1)
        swapped_BNV = logits_BNV.scatter(2, best.indices, best.values.flip(2))
        return probs_of_rows(swapped_BNV.where(is_swapped_BN1, logits_BNV), *others)

    monkeypatch.setattr(comparisons, "is_bitwise", lambda *_: is_bitwise)
    monkeypatch.setattr(choose, "rounds_of", lambda _: None)
    monkeypatch.setattr(runner, "probs_of_rows", swap_top_two)
    code, report = check(f"--method naive {flags}")
    greedy = report["comparisons"][0]
    assert (code, greedy["verdict"]) == (verdict == "BUG", verdict)
    assert (greedy["score_gap"] <= greedy["bound"]) == (verdict != "BUG" or is_bitwise)
    assert greedy["bound"] < (1 if "bfloat16" in flags else 1e-4)


@pytest.mark.parametrize(
    ("flags", "num_methods"),
    [("--top-p 0.95 --temperature 1.2", 3), ("--top-k 1 --method naive", 1)],
)
def test_sound_samples_are_consistent(check_samples, flags, num_methods):
    """One case has top-k 1, whose scores have no variance."""
    code, rows = check_samples(f"--num-samples 300 --seed 4294967295 {flags}")
    assert (code, len(rows)) == (0, num_methods)
    assert all(row["verdict"] == "consistent" and row["num_tokens"] == 320 for row in rows)
    assert min(row["least_p_value"] for row in rows) > 1e-3


def resample_from_p(p_BNV, uniforms_BN, guesses):
    """The published TriForce code: a rejected guess is replaced by a sample from p itself."""
    verdict = verify(p_BNV, uniforms_BN, guesses)
    p_BV = p_BNV[range(len(p_BNV)), verdict.num_accepted_B]
    return verdict._replace(next_B=sample(p_BV, uniforms_BN[:, -1]))


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "BUG"), ("bfloat16", "unclear")])
def test_samples_of_a_broken_verification_raise_an_alarm(
    check_samples, monkeypatch, dtype, verdict
):
    """A departure in bfloat16 may be rounding, and is called unclear."""
    monkeypatch.setattr(comparisons, "is_bitwise", lambda *_: False)
    monkeypatch.setattr(random_source, "verify_block", resample_from_p)
    code, [row] = check_samples(f"--method naive --num-samples 1500 --dtype {dtype}")
    assert (code, row["verdict"]) == (1, verdict)
