"""Documents with questions, on a tiny model, and programs that die."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SENTENCES

WORDS = " ".join(SENTENCES).split()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def documents(num: int, *, num_words: int = 70, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=num_words)) for _ in range(num)]


def write_questions(file: Path, num: int, num_documents: int) -> None:
    """In a random order."""
    texts = documents(num_documents)
    lines = [{"id": f"q{i}", "prompt": f"{texts[i % num_documents]} {i}?"} for i in range(num)]
    random.Random(2).shuffle(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def processes(title: str) -> list[int]:
    """Those of Ray's workers whose title begins so."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(title.encode()):
                found.append(int(file.parent.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


@pytest.fixture
def start() -> Iterator[object]:
    """Starts a program, which ends with the test at the latest."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *map(str, words)]
        pipes = {"stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT} | options
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()
