"""Whatever is wrong on a command line is one line that names it: cases, and any flags."""

import importlib
import io
import logging
import os
import random
import re
import shlex
import shutil
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from minitri import generate, loader
from minitri.apps import plan
from minitri.apps.cli import inputs
from minitri.apps.cli.arguments import OneLineParser
from tests.conftest import tiny_engine

BAD = Path(__file__).with_name("bad_flags.txt").read_text("utf-8")
NO_MODEL = ("minitri", "minitri.apps.plan")


@pytest.fixture(scope="module")
def strange(folder, tmp_path_factory) -> Path:
    """A folder with the files and models that `BAD` names."""
    here = tmp_path_factory.mktemp("strange")
    (here / "binary").write_bytes(b"ab\0")
    (here / "one").write_text('{"prompt": "y"}\n')
    (here / "twice").write_text('{"id": 2, "prompt": "x"}\n{"prompt": "y"}\n')
    shutil.copytree(folder, here / "tiny")
    return here


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_bad_input_is_one_line_of_three_parts(strange, call, line, monkeypatch):
    """The problem, the value, the way out; only flags that the program has, or was given."""
    monkeypatch.chdir(strange)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "ray", None)
    flags, message = line.split(" | ")
    name, *words = shlex.split(flags)
    if name not in NO_MODEL and "--model" not in words:
        words += ["--model", "tiny"]
    if name != "minitri":
        words.append("--quiet")
    if name == "minitri.generate":
        words += [] if "-n" in words else ["-n", "8"]
        words += [] if "--prompt" in flags else ["--prompt", "x"]
    module = importlib.import_module("minitri.__main__" if name == "minitri" else name)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        values = {"LONG": "word " * 600, "LONE": "a\udcff", "BUSY": str(busy.getsockname()[1])}
        code, out, err = call(module.main, *(values.get(word, word) for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err.removeprefix("minitri: ").strip()), err
    assert re.match(r"minitri: .*\w.*; \S", err), err
    if name != "minitri":
        known = {*re.findall(r"--[a-z0-9-]+", call(module.main, "--help-all").out)}
        known |= {word.partition("=")[0] for word in words}
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", err)} <= known


NUM_LINES = int(os.environ.get("MINITRI_FUZZ_EXAMPLES", "30"))
PLAIN = """0 1 2 8 64 256 -1 2147483647 2147483648 １２ 1_000 +7 0x10 1e3 1e-7 -0.0 0.5 1.5 nan -inf
1e400 auto none ngram cpu cuda:99 yarn:2 yarn:1e9 - -- --- -h é🙂 \udcff \0 \x1b[31m llama2-7b-128k
ORG/NAME ../.. / ~ /dev/null /dev/full /nowhere/x.png"""
VALUES = ["", " 7 ", "%s %(prog)s {}", "a\nb\rc\u2028d", *PLAIN.split(), __file__]
VALUES += ["9" * 23, "-" + "9" * 5000, "0." + "1" * 5000, "A" * 10000]
FINE = {"N": (*("1", "2", "4", "8", "16", "32", "64") * 2, "2147483647"), "X": ("0", "0.5", "1")}
"""Values that most flags take, by what their help calls the value."""


def command_line(parser: OneLineParser, draw: random.Random) -> list[str]:
    """Up to six flags of a program with values that often make sense, and two that rarely do."""
    actions, words = parser._actions[1:], []  # without --help
    for _ in range(draw.randint(0, 6)):
        action = draw.choice(actions)
        words.append(draw.choice(action.option_strings or ["--"]))
        if action.nargs != 0:
            known = action.choices or FINE.get(action.metavar, VALUES)
            words.append(draw.choice([*known]))
    for _ in range(draw.randint(0, 2)):
        name = draw.choice(draw.choice(actions).option_strings or ["--"])
        value = draw.choice(VALUES)
        words += draw.choice([[value], [name, value], [f"{name}={value}"]])
    return words


@pytest.fixture
def tiny_models(monkeypatch):
    engine = tiny_engine()
    parts = {"tokenizer": engine.tokenizer, "config": engine.config, "load": lambda: engine}
    monkeypatch.setattr(loader, "OpenEngine", lambda **_: SimpleNamespace(**parts))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(inputs, "is_piped", lambda: True)
    yield
    logging.getLogger("minitri").handlers = []


SHORT = ["--max-new-tokens=4", "--max-prompt-tokens=40", "--quiet"]
PROGRAMS = {
    "generate": (generate.main, generate.build_parser(), SHORT),
    "plan": (plan.main, OneLineParser("plan"), []),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.usefixtures("tiny_models")
def test_any_flags_run_or_are_refused_in_one_line(program):
    main, parser, fixed = PROGRAMS[program]
    draw = random.Random(0)
    for _ in range(NUM_LINES):
        argv = command_line(parser, draw)
        out, err, stdin = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(b"She had"))
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "stdin", stdin)
            with pytest.raises(SystemExit) as ended:
                main([*fixed, *argv])
        lines = [line for line in err.getvalue().splitlines() if line.startswith("minitri: ")]
        code = ended.value.code or 0
        assert code in (0, 2), argv
        assert lines == err.getvalue().splitlines()[-1:] * (code == 2), argv
        assert all(len(line) < 1000 for line in lines), argv
