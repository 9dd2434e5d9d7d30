"""The script of the first run on a GPU brings a report home, whatever its programs do."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
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
def run(tmp_path, monkeypatch):
    """Runs calls with a stand-in for python3; their exit code, screen and report."""

    def start(body: str, *calls: str, has_cuda: bool = True):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        asked = f'case "$*" in *is_available*) exit {0 if has_cuda else 3};; esac'
        (folder / "python3").write_text(f"#!/bin/bash\n{asked}\necho ran $*\n{body}\n")
        (folder / "python3").chmod(0o755)
        report = tmp_path / "out/gpu_report.txt"
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GRACE": "1"}
        env["REPORT"] = str(report)
        done = subprocess.run(["bash", SCRIPT, *calls], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, report.read_text() if report.is_file() else ""

    return start


def outcomes(text: str) -> list[str]:
    """The lines of the summary, one for each part, without the seconds."""
    summary = text.rpartition("SUMMARY")[2]
    lines = [line[3:] for line in summary.splitlines() if line.startswith("--")]
    return [re.sub(r" \(\d+ s\)", "", line) for line in lines]


def test_a_report_has_what_every_part_wrote_and_another_call_adds_to_it(run):
    code, screen, report = run("env | grep -E 'OFFLINE|NO_INDEX'", "attention")
    assert code == 0
    assert report in screen.replace("\r", "")
    assert {"HF_HUB_OFFLINE=1", "PIP_NO_INDEX=1"} <= set(report.splitlines())
    names = ["environment", "kernels against their oracles", "made-up weights on chip"]
    assert outcomes(report) == [f"{name}: exit code 0" for name in names]
    assert run("exit 1", "engine")[0] == 2
    assert run("", "engine", has_cuda=False)[0] == 3
    _, _, both = run("", "engine")
    assert both.startswith(report)
    assert both.count("SUMMARY") >= 3


def test_limits_add_up_and_every_test_and_program_is_there():
    text = SCRIPT.read_text()
    calls = re.findall(r"^call_(\w+)\(\) \{\n(.*?)^\}", text, re.M | re.S)
    assert [name for name, _ in calls] == re.search(r'CALLS="(.*)"', text)[1].split()
    for _, body in calls:
        limits = re.findall(r'(?:part|tests|made_up) "[^"]+" (\d+)', body)
        assert 0 < sum(map(int, limits)) <= 520  # and the question whether there is a GPU
    for file in re.findall(r"tests/gpu\w*/\w+\.py", text):
        assert (SCRIPT.parents[1] / file).is_file()
    for module in re.findall(r"-m (\w+(?:\.\w+)+)", text):
        assert find_spec(module), module


def test_weights_arrive_in_pieces_and_are_the_same_but_for_rounding(folder, tmp_path, monkeypatch):
    """A matrix may be cut; a piece that is missing is noticed."""
    monkeypatch.setattr(weight_pieces, "LIMIT", 60_000)
    monkeypatch.setattr(weight_pieces, "RUN", 5_000)
    pieces, joined = tmp_path / "pieces", tmp_path / "joined"
    write_pieces(str(folder), pieces)
    files = sorted(pieces.iterdir())
    assert len(files) > 2
    join_pieces(pieces, joined)
    ours, theirs = (minitri.load(x, dtype="float32", device="cpu") for x in (joined, folder))
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids
    assert ours.tokenizer.encode("the harbour") == theirs.tokenizer.encode("the harbour")
    for got, exact in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (got - exact).abs().max() <= 0.01 * exact.abs().max()
    files[1].unlink()
    with pytest.raises(InputError, match="not hold one whole set of pieces, got piece-1-of"):
        join_pieces(pieces, joined)
