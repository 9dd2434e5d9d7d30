"""What a model writes is a text, whatever its characters would make of a terminal."""

import io
import sys
from types import SimpleNamespace

import pytest

from minitri import Token
from minitri.apps.cli.terminal import COLORS, RESET, stream

ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\x7f\tb\nü\u2028"
SHOWN = "a\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffd\ufffd\ufffd\tb\nü\u2028"


class Output(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


class Run(list):
    rows = (SimpleNamespace(prompt_ids=[1]),)


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_reach_a_pipe_but_no_terminal(color, is_terminal, monkeypatch):
    output = Output(is_terminal)
    monkeypatch.setattr(sys, "stdout", output)
    events = [Token(0, 5, text, "draft") for text in ("x", ATTACK, "\x1b")]
    stream(Run(events), SimpleNamespace(quiet=True, color=color), show=True)
    parts = ["x", SHOWN, "\ufffd"] if is_terminal else ["x", ATTACK, "\x1b"]
    start, end = (COLORS["draft"][0], RESET) if color else ("", "")
    assert output.getvalue() == "".join(start + part + end for part in parts)
