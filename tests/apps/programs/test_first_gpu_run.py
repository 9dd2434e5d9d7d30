"""The script of the first run on a GPU brings a report home, and weights arrive there in pieces."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minitri
from minitri.core.errors import InputError
from tools import weight_pieces
from tools.weight_pieces import join_pieces, write_pieces

SCRIPT = Path(__file__).parents[3] / "tools/first_gpu_run.sh"
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "timeout", "tail"))), reason="needs bash and GNU's timeout"
)


@pytest.fixture
def run(tmp_path):
    """Runs calls with a stand-in for python3; their exit code, screen and report."""

    def start(body: str, *calls: str, has_cuda: bool = True, **settings: str):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        asked = f'case "$*" in *0?if?torch.cuda*) exit {0 if has_cuda else 3};; esac'
        (folder / "python3").write_text(f"#!/bin/bash\n{asked}\necho ran $*\n{body}\n")
        (folder / "python3").chmod(0o755)
        report = tmp_path / "out/gpu_report.txt"
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GRACE": "1", **settings}
        env["REPORT"] = str(report)
        done = subprocess.run(["bash", SCRIPT, *calls], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, report.read_text() if report.is_file() else ""

    return start


def outcomes(text: str) -> list[str]:
    """The summary's line on each part, without the seconds."""
    lines = text.rpartition("SUMMARY")[2].splitlines()
    return [re.sub(r" \(\d+ s\)", "", line[3:]) for line in lines if line[:2] == "--"]


def test_a_report_has_what_every_part_wrote_and_another_call_adds_to_it(run):
    """Without a device, or a call, it stops at once."""
    code, screen, report = run("env | grep OFFLINE", "attention")
    assert code == 0
    assert "HF_HUB_OFFLINE=1" in report
    assert report in screen.replace("\r", "")
    names = ["environment", "kernels against their oracles", "made-up weights on chip"]
    assert outcomes(report) == [f"{name}: exit code 0" for name in names]
    code, _, both = run("exit 1", "engine")
    assert (code, both.startswith(report)) == (2, True)
    code, screen, report = run("", "attention", has_cuda=False)
    assert (code, "ran" in screen, "no CUDA device" in report) == (3, False, True)
    assert run("", "--cpu", "engine", has_cuda=False)[0] == 0
    assert run("", "nonsense")[0] == 2


@pytest.mark.slow
def test_a_dry_run_ends_in_time_with_a_complete_report(run, monkeypatch):
    """Real programs run at small shapes, without real weights; tests are only collected. Where
    parts differ by their names alone, the command runs once."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # kernels take too long to be timed
    once = 'grep -qxF -- "$*" $0.ran && exit; echo "$*" >> $0.ran'
    calls = ("--cpu", "attention", "weights", "engine", "offload")
    body = f'{once}; exec {sys.executable} "$@"'
    code, _, report = run(body, *calls, PYTEST_ADDOPTS="--collect-only")
    assert (code, len(outcomes(report))) == (0, 9)
    assert all(line.endswith("exit code 0") for line in outcomes(report)), report[-3000:]


def test_weights_arrive_in_pieces_and_are_the_same_but_for_rounding(folder, tmp_path, monkeypatch):
    """A matrix may be cut; a piece that is missing is noticed."""
    monkeypatch.setattr(weight_pieces, "LIMIT", 60_000)
    monkeypatch.setattr(weight_pieces, "RUN", 5_000)
    pieces, joined = tmp_path / "pieces", tmp_path / "joined"
    write_pieces(str(folder), pieces)
    files = sorted(pieces.iterdir())
    assert len(files) > 2
    join_pieces(pieces, joined)
    how = {"dtype": "float32", "device": "cpu"}
    ours, theirs = minitri.load(joined, **how), minitri.load(folder, **how)
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids
    assert ours.tokenizer.encode("the harbour") == theirs.tokenizer.encode("the harbour")
    for got, exact in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (got - exact).abs().max() <= 0.01 * exact.abs().max()
    files[1].unlink()
    with pytest.raises(InputError, match="not hold one whole set of pieces, got piece-1-of"):
        join_pieces(pieces, joined)
