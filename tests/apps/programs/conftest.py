"""A command line on the tiny model."""

import json
import shutil
from pathlib import Path

import pytest

from minitri import __main__ as command
from tests.conftest import Done, edit_json


@pytest.fixture
def run(folder, call):
    """Runs a program, `minitri` by default, on the tiny model for 8 tokens, or as the words say."""

    def run(*words: str, model=folder, program=command.main) -> Done:
        given = ["-m", str(model), "--dtype", "float32", "--ignore-eos"] if model else []
        given += ["-n", "8"] if model and not {"-n", "--max-new-tokens"} & {*words} else []
        return call(program, *words, *given)

    return run


@pytest.fixture
def advised(folder, tmp_path):
    """Copies the tiny model, with other settings in its generation_config.json."""

    def advised(**settings: object) -> Path:
        model = Path(shutil.copytree(folder, tmp_path / "advised"))
        edit_json(model / "generation_config.json", **settings)
        return model

    return advised


@pytest.fixture
def run_lines(run, tmp_path):

    def run_lines(*lines: object, flags: tuple[str, ...] = (), **options) -> Done:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return run("--prompts", str(file), *flags, **options)

    return run_lines
