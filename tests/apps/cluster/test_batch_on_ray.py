"""A file of prompts on replicas that Ray runs, which die at random moments."""

import json
import os
import random
import signal
import time

import pytest

from minitri import generate
from tests.apps.cluster.conftest import processes, write_questions

pytest.importorskip("ray", reason='needs pip install -e ".[ray]"')
pytestmark = pytest.mark.slow
NUM_PROMPTS = 300


def read(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


def num_lines(file) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_each_id_has_one_answer_whatever_dies(folder, tmp_path, start, call):
    """Two replicas and then the program itself are killed; the same command does the rest."""
    prompts, output = (tmp_path / name for name in ("in.jsonl", "out.jsonl"))
    write_questions(prompts, NUM_PROMPTS, 20)
    rng = random.Random(7)
    words = ["--prompts", prompts, "-m", folder, "--dtype", "float32", "-n", 8]
    words += ["--ignore-eos", "--temperature", 0.8, "--seed", 5]
    alone = call(generate.main, *words, "--coupled", "-q")
    on_ray = ["minitri.generate", *words, "--ray", "local", "--replicas", 3, "--threads", 1]
    on_ray += ["--output", output]
    begun = time.monotonic()
    program = start(*on_ray)
    moments = sorted(rng.sample(range(10, NUM_PROMPTS - 60), 3))
    for moment, is_last in zip(moments, (False, False, True), strict=True):
        while num_lines(output) < moment:
            assert program.poll() is None, program.stderr.read()
            time.sleep(0.005)
        if is_last:
            program.kill()
        else:
            os.kill(rng.choice(processes("ray::Replica")), signal.SIGKILL)
    program.communicate()
    held = num_lines(output)
    assert held < NUM_PROMPTS
    with output.open("a") as file:
        file.write('{"id": "q1", "te')  # as a write that was cut
    again = start(*on_ray)
    told = again.communicate(timeout=60)[1]
    assert again.returncode == 0, told
    answers = read(output.read_bytes())
    assert len({it["id"] for it in answers}) == len(answers) == NUM_PROMPTS
    wanted = {it["id"]: (it["token_ids"], it["seed"]) for it in read(alone.out.encode())}
    assert {it["id"]: (it["token_ids"], it["seed"]) for it in answers} == wanted
    num_prompt, num_cached = (
        sum(it[name] for it in answers) for name in ("num_prompt_tokens", "num_cached_tokens")
    )
    assert num_cached >= 0.85 * num_prompt
    print(
        f"replicas killed at {moments[:2]} answers, the program at {held}; "
        f"{num_cached / num_prompt:.1%} of {num_prompt} prompt tokens cached, "
        f"{time.monotonic() - begun:.1f} s in all"
    )
