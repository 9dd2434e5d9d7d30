"""The script of the first run on a GPU brings a report home."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/first_gpu_run.sh"
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "timeout", "tail"))), reason="needs bash and GNU's timeout"
)


@pytest.fixture
def run(tmp_path):
    """Runs calls with a stand-in for python3; their exit code, screen and summary."""

    def start(body: str, *calls: str, has_cuda: bool = True, **settings: str):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        asked = f'case "$*" in *0?if?torch.cuda*) exit {0 if has_cuda else 3};; esac'
        (folder / "python3").write_text(f"#!/bin/bash\n{asked}\necho ran $*\n{body}\n")
        (folder / "python3").chmod(0o755)
        report = tmp_path / "out"
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "GRACE": "1", **settings}
        env["REPORT"] = str(report)
        done = subprocess.run(["bash", SCRIPT, *calls], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, (report / "summary.txt").read_text()

    return start


def outcomes(summary: str) -> list[str]:
    """Its line on each part, without the seconds."""
    lines = summary.splitlines()
    return [re.sub(r" \(\d+ s\)", "", line[3:]) for line in lines if line[:2] == "--"]


@pytest.mark.slow
def test_a_dry_run_ends_in_time_with_results(run, monkeypatch):
    """Real programs run at small shapes, without real weights; tests are only collected. Without a
    device nothing begins, as with an unknown call."""
    assert run("", "first", has_cuda=False)[0] == 3
    assert run("", "nonsense")[0] == 2
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # kernels take too long to be timed
    body = f'[[ $* == *smollm2* ]] || exec {sys.executable} "$@"'
    code, _, summary = run(body, "--cpu", PYTEST_ADDOPTS="--collect-only")
    assert (code, len(outcomes(summary))) == (0, 9), summary
    assert "RESULT guesses by same" in summary
