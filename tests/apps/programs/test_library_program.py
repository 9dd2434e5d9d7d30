"""The first program of somebody who comes from `transformers` runs as it is written."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import SENTENCES
from tests.files.test_chat_template import CHATML

PROGRAM = Path(__file__).with_name("library_program.py")
DOCUMENT = " ".join(SENTENCES[:2])


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Runs the program: all that it prints, and how much of each question's prompt was known."""

    def printed(model, document: str) -> tuple[str, list[int]]:
        (tmp_path / "novel.txt").write_text(document)
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), str(model), str(tmp_path / "novel.txt")])
        capsys.readouterr()
        runpy.run_path(str(PROGRAM), run_name="__main__")
        out = capsys.readouterr().out
        return out, [int(count) for count in re.findall(r"^W[^?]*\? (\d+) tokens", out, re.M)]

    return printed


def test_it_runs_on_a_tiny_model(folder, tmp_path, printed):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHATML)
    out, known = printed(model, DOCUMENT)
    assert known[0] < 10 < 80 < min(known[1:])
    assert "perplexity tensor(" in out
    assert "End(row=0, finish_reason='" in out


@pytest.mark.slow
def test_it_runs_on_real_weights(real_weights, long_text, printed):
    _, known = printed("smollm2-135m", long_text[:20_000])
    assert known[0] < 10 < 3000 < min(known[1:])
