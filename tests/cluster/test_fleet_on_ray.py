"""Sixty clients of three servers that Ray runs, of which one dies meanwhile."""

import json
import os
import random
import re
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from minitri import generate
from tests.cluster.conftest import documents, processes

pytest.importorskip("ray", reason='needs pip install -e ".[ray]"')
pytestmark = pytest.mark.slow
NUM_CLIENTS, NUM_DOCUMENTS, NUM_TURNS = 60, 20, 5
SAMPLING = {"seed": 5, "temperature": 0.8}


def ask(url: str, prompt: str, *, stream: bool) -> tuple[str | None, int, float]:
    """The text, or None where the client is told to ask again; cached tokens; seconds."""
    fields = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": stream, **SAMPLING}
    fields |= {"stream_options": {"include_usage": True}} if stream else {}
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(fields).encode(), kind)
    begun = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            told = response.read().decode()
    except urllib.error.HTTPError as error:
        told = error.read().decode()
    seconds = time.monotonic() - begun
    parts = [it.removeprefix("data: ") for it in told.split("\n\n") if it and "[DONE]" not in it]
    parts = [json.loads(it) for it in parts if it[0] == "{"]
    if "error" in parts[-1]:
        assert "ask again" in parts[-1]["error"]["message"]
        return None, 0, seconds
    text = "".join(it["choices"][0]["text"] for it in parts if it["choices"])
    return text, parts[-1]["usage"]["prompt_tokens_details"]["cached_tokens"], seconds


def prompts_of(texts: list[str]) -> list[list[str]]:
    """What each client asks, one after the other, about its document."""
    numbers = range(NUM_CLIENTS)
    prompts = [[f"{texts[i % len(texts)]} {i} {j}?" for j in range(NUM_TURNS)] for i in numbers]
    random.Random(3).shuffle(prompts)
    return prompts


def test_clients_of_three_replicas_of_which_one_dies(folder, tmp_path, start, call):
    words = ["-m", folder, "--dtype", "float32", "--threads", 1]
    begun = time.monotonic()
    flags = ["--port", 0, "--batch-size", 6]  # rows, whose K and V are kept
    program = start("minitri.serve", *words, *flags, "--ray", "local", "--replicas", 3)
    lines = iter(program.stderr)
    url = next(it[1] for line in lines if (it := re.search(r"(http://\S+/v1)", line)))
    ready = (it[1] for line in lines if (it := re.search(r"ready at (\S+)", line)))
    urls = [f"http://{next(ready)}/v1" for _ in range(3)]
    told = [f"{time.monotonic() - begun:.1f} s until three are ready"]

    texts = documents(2 * NUM_DOCUMENTS)
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        in_turns = prompts_of(texts[NUM_DOCUMENTS:])
        calls = [
            clients.submit(ask, urls[(i + j) % 3], prompt, stream=False)
            for j in range(NUM_TURNS)
            for i, prompt in enumerate(it[j] for it in in_turns)
        ]
        num_in_turns = sum(it.result()[1] for it in calls)

        answers: dict[str, tuple[str | None, int, float]] = {}

        def talk(number: int, prompts: list[str]) -> None:
            for prompt in prompts:
                answers[prompt] = ask(url, prompt, stream=number % 2 == 0)

        asked = prompts_of(texts[:NUM_DOCUMENTS])
        talks = [clients.submit(talk, *it) for it in enumerate(asked)]
        while len(answers) < NUM_CLIENTS // 2:
            time.sleep(0.01)
        os.kill(processes("ray::serve_alone")[0], signal.SIGKILL)
        killed_at = len(answers)
        for it in talks:
            it.result()
    assert next(ready)  # the fourth
    assert len(answers) == NUM_CLIENTS * NUM_TURNS
    told.append(f"the slowest took {max(seconds for *_, seconds in answers.values()):.1f} s")
    num_failed = sum(text is None for text, *_ in answers.values())
    assert num_failed <= NUM_CLIENTS // 2
    num_by_prefix = sum(num for _, num, _ in answers.values())

    file = tmp_path / "in.jsonl"
    line = {"max_new_tokens": 8, "ignore_eos": True, **SAMPLING}
    file.write_text("".join(json.dumps({"id": it, "prompt": it, **line}) + "\n" for it in answers))
    alone = call(generate.main, *words, "--prompts", file, "--coupled", "-q")
    wanted = {it["id"]: it["text"] for it in map(json.loads, alone.out.splitlines())}
    assert all(text in (None, wanted[prompt]) for prompt, (text, *_) in answers.items())

    told.append(f"one killed after {killed_at} answers; {num_failed} of {len(answers)} failed")
    told.append(f"cached tokens: {num_in_turns} in turns, {num_by_prefix} by prefix")
    print("; ".join(told))
    assert num_by_prefix >= 2 * num_in_turns
    program.send_signal(signal.SIGINT)
    assert program.wait(30) == 0
    assert "stopped" in program.stderr.read()
