"""Commands of README.md and docs/programs.md, the Python program: real weights, no network.

`ADDED` has flags for each command that make it short; `OTHERS` need more than this machine.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from minitri.apps.cli.inputs import demo_text

ROOT = Path(__file__).parents[3]
README = "".join((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/programs.md"))
LLAMA = "llama2-7b-128k"
ADDED = {
    'minitri "The sea was" -n 60': "",
    "minitri chat --document novel.txt --fit": "--max-prompt-tokens 500 -n 8",
    "minitri -n 200 --max-prompt-tokens 20000 --rope-scaling yarn:4 < novel.txt": "-n 8 "
    "--max-prompt-tokens 600",
    'minitri "A ship, as JSON:" --json-object': "-n 8",
    "minitri --prompt-file novel.txt --max-prompt-tokens 7000 --save-kv a.kv": "-n 8 "
    "--max-prompt-tokens 600 --temperature 0",
    f"minitri --model {LLAMA} --prompt-file novel.txt --max-prompt-tokens 120000 --json "
    "--logprobs 3": "",
    'minitri "The sea was" --method triforce': "-n 8",
    "minitri chat": "-n 8",
    "minitri score novel.txt --max-prompt-tokens 8000": "--max-prompt-tokens 300",
    "minitri selftest --model M": "--max-prompt-tokens 300 --max-new-tokens 8 --num-samples 64 "
    "--method naive",
    "python -m tools.bench compare": "--max-prompt-tokens 300 -n 8 --seeds 1 --method naive",
    "minitri plan": "",
    "python -m tools.paper": "",
    "python -m tools.race --prompt-file persuasion.txt --weights dense": "-n 4 "
    "--max-prompt-tokens 600",
}
"""Commands to run, each with flags that come after its own."""
OTHERS = ("torchrun ", "python -m tools.b", "python -m pytest", "python3 -m venv", "pytest ")
OTHERS += ("python -m tools.audit", "minitri serve", "pip install")
"""Beginnings of commands that need two GPUs, a server, an index of packages, or are this suite."""


def commands() -> list[str]:
    """Shell lines of blocks, and what in a sentence or table begins like a command."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    shell = "".join(text for kind, text in blocks if not kind)
    lines = [line.partition("  #")[0] for line in shell.splitlines()]
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    lines += (" ".join(words.split()) for words in re.findall(r"`([^`]+)`", text))
    parts = [part.strip() for line in lines for part in line.split(" && ")]
    start = r"(minitri [-\"a-z]|python3? -m |pytest |torchrun |pip install )"
    parts = [part for part in parts if re.match(start, part) and "/  " not in part]
    return list(dict.fromkeys(parts))


def test_every_command_is_run_or_known_to_need_more():
    assert [line for line in commands() if line not in ADDED and not line.startswith(OTHERS)] == []
    assert ADDED.keys() <= {*commands()}


@pytest.fixture(scope="module")
def novel(tmp_path_factory) -> Path:
    """A folder with a text as long as a novel."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("novel.txt", "persuasion.txt"):
        (folder / name).write_text((demo_text() * 2)[:740_000], "utf-8")
    return folder


def run(command: str, folder: Path, weights: Path, typed: str | None) -> tuple[int, str, str]:
    """Runs a command in a folder, offline, with the weights where they are, on a novel or what is
    typed; exit code and outputs."""
    line = command.removeprefix("python -m ").replace("< novel.txt", "")
    words = [sys.executable, "-m", *shlex.split(line.replace(" M", " smollm2-135m"))]
    places = {"HF_HUB_OFFLINE": "1", "MINITRI_WEIGHTS": str(weights.parents[1])}
    places["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with (folder / "novel.txt").open() as novel:
        stdin = {"stdin": novel} if typed is None else {"input": typed}
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, **places}, text=True, capture_output=True, **stdin
        )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("command", "added"), ADDED.items())
def test_a_command_does_what_it_says(command, added, novel, real_weights):
    typed = "What is it about?\n" if "chat" in command else None
    code, out, err = run(f"{command} {added}", novel, real_weights, typed)
    if LLAMA in command:  # which is not at hand
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "HF_HUB_OFFLINE" in err
        return
    assert (code, err if code else "") == (0, "")
    assert out.strip()
    if "--save-kv" in command:
        later = f"{command} {added}".replace("--save-kv", "--load-kv")
        code, again, err = run(later, novel, real_weights, typed)
        assert (code, again) == (0, out)
        assert re.search(r" of it for \d{1,2} tokens of the prompt", err)


@pytest.mark.slow
def test_the_program_runs_as_written(real_weights, capsys):
    [program] = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    exec(program, {})
    assert len(capsys.readouterr().out) > 100
