"""Faults of a server's process, and of the files that it has mapped: its clients go on."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.files.test_checkpoint import as_gguf

FIELDS = {"prompt": "She had", "max_tokens": 300, "ignore_eos": True, "seed": 7}


@contextlib.contextmanager
def started(model, *flags):
    """A server's process, what it says, line by line, and a client of it."""
    command = [sys.executable, "-m", "minitri", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr)
        try:
            url = next(found[1] for it in lines if (found := re.search(r"(http://\S+)/v1", it)))
            with httpx.Client(base_url=url, timeout=300) as http:
                yield process, lines, http
        finally:
            process.kill()


def ask(http, **fields) -> str:
    answer = http.post("/v1/completions", json=FIELDS | fields).raise_for_status()
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("seconds", [3, pytest.param(70, marks=pytest.mark.slow)])
def test_a_server_that_stands_still_for_a_while_goes_on(folder, seconds):
    """SIGSTOP, for longer than a worker may be silent, and SIGCONT: a stream has the rest of its
    text, and requests that came meanwhile theirs; so nothing counts as stuck."""
    with started(folder, "--stall-seconds=1") as (process, _, http), ThreadPoolExecutor() as others:
        with http.stream("POST", "/v1/completions", json=FIELDS | {"stream": True}) as stream:
            parts = (it[6:] for it in stream.iter_lines() if it.startswith("data"))
            text = [next(parts)]
            process.send_signal(signal.SIGSTOP)
            late = [others.submit(ask, http, prompt=it) for it in ("She", "had")]
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{http.base_url}/health", timeout=0.5)
            time.sleep(seconds)
            process.send_signal(signal.SIGCONT)
            text += parts
        assert text.pop() == "[DONE]"
        assert "".join(json.loads(it)["choices"][0]["text"] for it in text) == ask(http)
        assert [it.result() for it in late] == [ask(http, prompt=it) for it in ("She", "had")]
        assert http.get("/v1/models").json()["data"][0]["id"] == folder.name  # not where it is
        assert http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_weights_that_are_overwritten_and_cut_while_in_use_change_nothing(folder, tmp_path, kind):
    """In place, as by `cp`: no page of the file is read any more."""
    if kind == "gguf":
        model = file = as_gguf(folder, tmp_path / "tiny.gguf")
    else:
        model = shutil.copytree(folder, tmp_path / "tiny")
        file = model / "model.safetensors"
    with started(model, "--dtype", "float32") as (_, _, http), file.open("r+b", 0) as mapped:
        text = ask(http)
        mapped.write(b"\xff" * file.stat().st_size)
        assert ask(http) == text
        mapped.truncate(9)
        assert ask(http) == text
        assert http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("grace", "signals", "end"),
    [
        (30, [signal.SIGINT], "data: [DONE]"),
        (30, [signal.SIGTERM], "data: [DONE]"),
        (0, [signal.SIGTERM], "the server is stopping; ask again later"),
        (30, [signal.SIGTERM, signal.SIGTERM], None),
        (30, [signal.SIGINT, signal.SIGINT], None),
    ],
    ids=["Ctrl-C", "in time", "too late", "twice", "twice by Ctrl-C"],
)
def test_a_signal_while_a_text_is_streamed(folder, grace, signals, end):
    fields = FIELDS | {"max_tokens": 500, "stream": True, "logprobs": 5}
    said = ""
    with started(folder, "--grace", str(grace)) as (process, lines, http):
        with http.stream("POST", "/v1/completions", json=fields) as response:
            parts = response.iter_lines()
            next(parts)
            process.send_signal(signals[0])
            said += next(lines)
            for other in signals[1:]:
                process.send_signal(other)
            try:
                last = [line for line in parts if line][-1]
            except httpx.HTTPError:
                last = None
        assert process.wait(30) == 0
        said += "".join(lines)
    assert end is None or end in last
    assert "finishing requests; again to stop now" in said
    assert "Traceback" not in said
    assert said.endswith("stopped\n")
