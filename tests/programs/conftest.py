"""A command line on the tiny model."""

import json
from typing import NamedTuple

import pytest

from minitri import __main__ as command


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def lines(self) -> dict[int, dict]:
        """The answers to --prompts, by their lines."""
        found = [json.loads(line) for line in self.out.splitlines()]
        return {answer["line"]: answer for answer in found}


@pytest.fixture
def run(folder, capsys):
    """Runs a program, `minitri` by default, on the tiny model for 8 tokens, or as the words say."""

    def run(*words: str, model=folder, program=command.main) -> Done:
        given = ["-m", str(model), "--dtype", "float32", "--ignore-eos"] if model else []
        given += ["-n", "8"] if model and not {"-n", "--max-new-tokens"} & {*words} else []
        with pytest.raises(SystemExit) as ended:
            program([*words, *given])
        captured = capsys.readouterr()
        return Done(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def run_lines(run, tmp_path):
    """Runs --prompts on lines, each a text or an object."""

    def run_lines(*lines: object, flags: tuple[str, ...] = (), **options) -> Done:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return run("--prompts", str(file), *flags, **options)

    return run_lines
