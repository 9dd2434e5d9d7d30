"""The command `minitri`: habits that its programs keep, what a shell may do to them, and
what a terminal may not be sent."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import minitri
from minitri import Token, generate
from minitri import __main__ as command
from minitri.apps.cli import exits, inputs
from minitri.apps.cli.terminal import COLORS, RESET, colored, shown
from minitri.text.tokenizer import Tokenizer

PROMPT = "She had been forced into prudence in her youth"


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_a_program_is_a_word_of_the_command(run, name):
    module = importlib.import_module(f"minitri.{command.PROGRAMS[name]}")
    help_text = run("--help", program=module.main, model=None)
    assert run(name, "--help", model=None) == help_text
    assert f"  minitri {name} " in help_text.out
    assert f"  {name} " in command.HELP


def test_a_text_goes_on_with_and_without_the_name_of_a_program(run):
    wanted = run("--prompt", PROMPT, program=generate.main).out
    for words in (("-q", "-p", PROMPT), ("generate", PROMPT, "-n8")):
        assert run(*words)[:2] == (0, wanted)


def test_nothing_at_a_terminal_is_answered_by_help(run, monkeypatch):
    assert run("help", model=None) == run("-h", model=None) == (0, command.HELP, "")
    monkeypatch.setattr(inputs, "is_piped", lambda: False)
    assert "there is no text" in run().err  # no terminal, no pipe
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert run(model=None) == (0, command.HELP, "")


HEAVY = {"argparse", "json", "logging", "typing", "dataclasses", "threading", "torch", "numpy"}
"""Modules that take milliseconds at least, so Ctrl-C is guarded before their import."""
MANY = Path(__file__).with_name("many_lines.txt").read_text("utf-8")


def run_many(*lines: str, flag: str = "-c") -> list[tuple[str, int, int, set[str]]]:
    """Text, exit code, lines of errors and modules after each command line in a new process."""
    words = [sys.executable, flag, MANY, *lines]
    out = subprocess.check_output(words, text=True, stdin=subprocess.DEVNULL)
    return [ast.literal_eval(line) for line in out.splitlines()]


def test_help_and_version_import_next_to_nothing():
    """Python runs with `-S -E`, so that nothing else has imported a module before."""
    version, text = run_many("--version", "-h", flag="-SEc")
    assert (version[0], text[0]) == (f"minitri {minitri.__version__}\n", command.HELP)
    assert not HEAVY & text[3]


QUICK = """
generate --help | chat --help | serve --help | plan --help | selftest --help
generate --list-models
"""
WRONG = """
generate --warp | generate -p x --system Short! | generate -p x --temperature -1
chat --chunk-size 7 --budget 30 | serve --tree 4x --method naive | plan --model lama2
selftest --top-p 2
"""


def test_help_and_wrong_flags_are_answered_without_pytorch():
    quick, wrong = (re.split(r" \| |\n", lines.strip()) for lines in (QUICK, WRONG))
    done = run_many(*quick, *wrong)
    for line, (_, code, num_errors, modules) in zip([*quick, *wrong], done, strict=True):
        assert (code, num_errors) == ((2, 1) if line in wrong else (0, 0)), line
        assert not modules & {"torch", "numpy", "gguf", "jinja2", "uvicorn"}, line


def test_a_message_is_put_into_the_template_and_only_it_is_cut(run, run_lines, engine, monkeypatch):
    def encode_chat(tokenizer, messages):
        text = "".join(f"<s>{message['role']}\n{message['content']}</s>" for message in messages)
        return tokenizer.encode(f"{text}<s>assistant\n")

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat, raising=False)
    messages = [{"role": "system", "content": "Short!"}, {"role": "user", "content": PROMPT}]
    whole, flags = encode_chat(engine.tokenizer, messages), ("--chat", "--system", "Short!")
    for done in (run_lines({"prompt": PROMPT}, flags=flags), run(PROMPT, *flags, "--json")):
        assert done.json["num_prompt_tokens"] == len(whole)
    text = f"{PROMPT}. " * 100
    args = SimpleNamespace(chat=True, system="Short!", max_prompt_tokens=300)
    cut = inputs.encode(text, engine, args, num_new=8)
    assert len(cut) == 300
    message = engine.tokenizer.decode(cut)
    assert message.startswith(f"system\nShort!user\n{text[:200]}")
    assert message.endswith("assistant\n")


def test_a_missing_package_is_one_line_and_a_mistake_is_no_bad_input(capsys):
    with pytest.raises(SystemExit, match="2"), exits.clean_exits():
        raise ModuleNotFoundError("No module named 'uvicorn'")
    err = capsys.readouterr().err
    assert re.fullmatch("minitri: .*'uvicorn'; pip install .*'minitri.*'\n", err)
    with pytest.raises(ValueError, match="a bug"), exits.clean_exits():
        raise ValueError("a bug")


def test_at_a_terminal_an_error_ends_its_lines_at_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit, match="2"), exits.clean_exits():
        raise minitri.InputError("prompt has 99 tokens; give --max-prompt-tokens")
    wanted = "minitri: prompt has 99 tokens;\ngive --max-prompt-tokens\n"
    assert capsys.readouterr().err == wanted


def test_sampling_is_as_the_model_says_where_no_flag_does(run, run_lines, advised):
    model = advised(do_sample=True, temperature=0.6, top_p=0.9)
    flags = (PROMPT, "--seed", "4", "--json")
    done = run(*flags, model=model)
    assert (done.code, done.json["temperature"]) == (0, 0.6)
    assert "; temperature 0.6, top_p 0.9, seed 4\n" in done.err
    sampled = run(*flags, "--temperature", "0.6", "--top-p", "0.9").json["token_ids"]
    greedy = run(*flags).json["token_ids"]
    assert done.json["token_ids"] == sampled
    done = run(*flags, "--temperature", "0", model=model)
    assert (done.json["token_ids"], done.json["temperature"]) == (greedy, 0)
    asked = {"prompt": PROMPT}, {"prompt": PROMPT, "temperature": 0}, {"prompt": "x", "seed": 3}
    done = run_lines(*asked, flags=("--seed", "4"), model=model)
    assert [done.lines[n]["token_ids"] for n in (1, 2)] == [sampled, greedy]
    done = run_lines(*asked, model=model)
    [drawn] = re.findall(r"; 3 prompts; .*, seed (\d+)$", done.err, re.MULTILINE)
    assert [done.lines[n]["seed"] for n in (1, 3)] == [int(drawn), 3]


PLAN = f"{sys.executable} -m minitri plan --gpu list"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (f"{PLAN} <&- >&- 2>&-", 0, ""),
        (f"{PLAN} >/dev/full", 2, "No space left on device"),
        (f"mkfifo p; : <p & exec 3>p; wait; {PLAN} >&3; echo $? >&2", 0, "0\n"),  # no reader
        (f"mkdir gone; cd gone; rmdir ../gone; {PLAN}", 2, "No such file or directory"),
    ],
)
def test_a_shell_may_close_fill_and_remove_what_a_program_uses(tmp_path, line, code, message):
    places = [Path.cwd(), *map(Path, filter(None, sys.path))]
    path = os.pathsep.join(str(place) for place in places if place.is_absolute())
    environment = {**os.environ, "PYTHONPATH": path}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(line, shell=True, check=False, **options)
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(message)), done.stderr
    assert message in done.stderr


ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\x7f\tb\nü\u2028"
HARMLESS = "a\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffd\ufffd\ufffd\tb\nü\u2028"


@pytest.mark.parametrize(("is_terminal", "wanted"), [(True, HARMLESS), (False, ATTACK)])
def test_control_characters_reach_a_pipe_but_no_terminal(is_terminal, wanted, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert shown(ATTACK) == wanted
    assert colored(Token(0, 5, ATTACK, "draft")) == COLORS["draft"][0] + wanted + RESET
