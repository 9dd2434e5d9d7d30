"""A model's text shows as text, whatever its characters would make of a terminal."""

import sys

import pytest

from minitri import Token
from minitri.apps.cli.terminal import COLORS, RESET, colored, shown

ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\x7f\tb\nü\u2028"
HARMLESS = "a\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffd\ufffd\ufffd\tb\nü\u2028"


@pytest.mark.parametrize(("is_terminal", "wanted"), [(True, HARMLESS), (False, ATTACK)])
def test_control_characters_reach_a_pipe_but_no_terminal(is_terminal, wanted, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert shown(ATTACK) == wanted
    assert colored(Token(0, 5, ATTACK, "draft")) == COLORS["draft"][0] + wanted + RESET
