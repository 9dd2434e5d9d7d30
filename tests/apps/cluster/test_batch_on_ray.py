"""A file of prompts on replicas that Ray runs, which die at random moments."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitri import generate
from tests.apps.cluster.test_batch import write_questions

pytest.importorskip("ray", reason='needs pip install -e ".[ray]"')
pytestmark = pytest.mark.slow
NUM_PROMPTS = 300
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def read(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def replicas() -> list[int]:
    """Process ids of Ray's workers that are replicas."""
    ids = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if file.read_bytes().startswith(b"ray::Replica"):
                ids.append(int(file.parent.name))
    return ids


def test_each_id_has_one_answer_whatever_dies(folder, tmp_path, call):
    """Two replicas and then the program itself are killed; the same command does the rest."""
    prompts, output = (tmp_path / name for name in ("in.jsonl", "out.jsonl"))
    write_questions(prompts, NUM_PROMPTS, 20)
    rng = random.Random(7)
    words = f"--prompts {prompts} -m {folder} --dtype float32 -n 8 --ignore-eos --temperature 0.8"
    words += " --seed 5"
    alone = call(generate.main, *words.split(), "--coupled", "-q")
    words += f" --ray local --replicas 3 --threads 1 --output {output}"
    command = [sys.executable, "-m", "minitri.generate", *words.split()]
    program = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        for moment in sorted(rng.sample(range(10, NUM_PROMPTS - 60), 3)):
            while num_lines(output) < moment:
                assert program.poll() is None
                time.sleep(0.005)
            if moment < NUM_PROMPTS // 2 and replicas():
                os.kill(rng.choice(replicas()), signal.SIGKILL)
    finally:
        program.kill()
        program.wait()
    assert num_lines(output) < NUM_PROMPTS
    with output.open("a") as file:
        file.write('{"id": "q1", "te')  # as a write that was cut
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=60)
    assert again.returncode == 0, again.stderr
    answers = read(output.read_text("utf-8"))
    assert len(answers) == NUM_PROMPTS
    wanted = {answer["id"]: answer["token_ids"] for answer in read(alone.out)}
    assert {answer["id"]: answer["token_ids"] for answer in answers} == wanted
    num_prompt = sum(answer["num_prompt_tokens"] for answer in answers)
    num_cached = sum(answer["num_cached_tokens"] for answer in answers)
    assert num_cached >= 0.8 * num_prompt  # common beginnings are read once per group
