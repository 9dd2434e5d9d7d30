"""The program from its start to its end: flags, memory, signals, and files that change."""

import collections
import contextlib
import functools
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest

from minitri import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.serve import app
from minitri.apps.serve.access import Access
from minitri.apps.serve.lossy_log import LossyHandler
from minitri.apps.serve.serving import SHARE, choose_rows, main, open_worker
from minitri.core import memory
from minitri.core.log import log
from minitri.core.offload.placement import GIB
from minitri.core.shape import MemoryShape
from tests.conftest import refused, resident_bytes, write_hf_folder

FIELDS = {"prompt": "She had", "max_tokens": 300, "ignore_eos": True, "seed": 7}
KIB = 1 / (1 << 20)


def test_an_empty_key_is_refused_before_the_model_is_read(call, monkeypatch):
    """Flags that let everybody ask give a warning."""
    monkeypatch.setattr(log, "handlers", [])
    flags = ("--model", "no-such-model", "--port", 0)
    for more in ([], ["--host=0.0.0.0"], ["--host=0.0.0.0", "--api-key=x"]):
        is_open = more == ["--host=0.0.0.0"]
        assert ("and there is no key" in call(main, *flags, *more).err) == is_open
    monkeypatch.setenv("MINITRI_API_KEY", "")
    for more in ([], ["--api-key= "]):
        done = call(main, *flags, *more)
        assert (done.code, done.err.count("\n"), "an API key is empty" in done.err) == (2, 1, True)


def test_a_log_that_nobody_reads_stops_nobody():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as pipe, os.fdopen(writer, "w") as written:
        handler = LossyHandler(written)
        records = [logging.makeLogRecord({"msg": "x" * 9000}) for _ in range(200)]  # of pieces
        thread = threading.Thread(target=lambda: [*map(handler.handle, records)], daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        num_lost = 200 - pipe.read(1 << 20).count(b"\n")
        again = logging.makeLogRecord({"msg": "again"})
        handler.handle(again)
        assert pipe.read(100) == b"again (after %d lines that are lost)\n" % num_lost
        assert again.getMessage() == "again"  # for other handlers


def test_a_log_line_that_cannot_be_written_stops_nobody(capsys):
    handler = LossyHandler(io.StringIO())
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    handler.stream.close()
    handler.handle(logging.makeLogRecord({"msg": "closed"}))
    assert capsys.readouterr().err.count("Logging error") == 2


def test_less_memory_is_fewer_rows_and_never_more_than_is_asked_for(engine, monkeypatch):
    generation = GenerationConfig(reserve=512).for_run(512)
    shape = MemoryShape((1,) * 8, SamplingParams(), generation, SpeculationConfig())

    choose = functools.partial(choose_rows, engine, shape)
    sizes = [(8, 9.0)]
    for num_rows in range(8, 0, -1):
        limit = sizes[-1][1] - KIB
        sizes.append(choose(limit, fewest=1))
        assert (sizes[-1][0], sizes[-1][1] <= limit) == (num_rows, True)
    weights = sum(it.num_bytes for it in {engine.models.target, engine.models.retrieval}) / GIB
    for change, num_rows in ((KIB, 8), (-KIB, 7)):  # by default a share of what was free before
        free = sizes[1][1] / SHARE - weights + change
        with monkeypatch.context() as patch:
            patch.setattr(memory, "free_host_bytes", lambda free=free: free * GIB)
            assert choose(None, fewest=1)[0] == num_rows
    for num_rows, gib in (sizes[1], sizes[8], (1, float("nan"))):
        with refused(f"{num_rows} x 512 tokens of tiny"):
            choose(gib - KIB, fewest=num_rows)


def test_the_shortest_context_has_room_for_the_text_that_warms_up(engine):
    args = OneLineParser("serve", Access).parse_args(["--context", "2", "--batch-size", "1"])
    assert args.temperature is None  # of requests that do not say: as the model's files have it
    worker, *size = open_worker(args, engine, SamplingParams(), SpeculationConfig())
    worker.close()
    assert size[:2] == [1, 2]


@contextlib.contextmanager
def started(model, *flags):
    """A server's process, the line of its start, the lines after it, and a client."""
    command = [sys.executable, "-m", "minitri", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr)
        try:
            start = next(line for line in lines if "/v1: " in line)
            url = re.search(r"(http://\S+)/v1", start)[1]
            with httpx.Client(base_url=url, timeout=300) as http:
                yield process, start, lines, http
        finally:
            process.kill()


def ask(http) -> str:
    answer = http.post("/v1/completions", json=FIELDS).raise_for_status()
    return answer.json()["choices"][0]["text"]


@contextlib.contextmanager
def streaming(http, **fields):
    with http.stream("POST", "/v1/completions", json=FIELDS | {"stream": True} | fields) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data"))
        yield next(lines), lines


@pytest.mark.parametrize(
    ("grace", "last"), [(1000000, "data: [DONE]"), (0, "the server is stopping; ask again later")]
)
def test_a_server_that_is_stopped_gives_its_streams_time(call, folder, monkeypatch, grace, last):
    """The program, whose client stops it as Ctrl-C does, in the middle of a stream."""
    run = app.Server.run
    said = []

    def stop(server, port):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                with streaming(http) as (_, rest):
                    server.handle_exit()
                    said.extend(rest)
        finally:
            server.should_exit = True

    def run_with_client(server, sockets):
        with ThreadPoolExecutor() as clients:
            client = clients.submit(stop, server, sockets[0].getsockname()[1])
            run(server, sockets)
        client.result()

    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(app.Server, "run", run_with_client)
    monkeypatch.setattr(app.threading, "Timer", Mock())  # which ends this process
    done = call(main, "--model", folder, "--port=0", "--batch-size=2", f"--grace={grace}")
    assert (done.code, last in said[-1]) == (0, True)
    assert "finishing requests; again to stop now" in done.err
    assert done.err.endswith("stopped\n")


@pytest.mark.slow
def test_a_server_goes_on_after_a_stop_and_with_other_weights_until_a_second_signal(tmp_path):
    """SIGSTOP, for longer than a model may be silent, and SIGCONT: nothing counts as stuck. The
    file of its weights is overwritten in place, and cut. Rows of a million tokens take memory only
    as far as texts have reached, not 4 GB."""
    model = write_hf_folder(tmp_path / "tiny", max_position_embeddings=1_000_000)
    file = model / "model.safetensors"
    flags = ("--stall-seconds=5", "--dtype=float32", "--context=1000000", "--memory=5.2")
    with started(model, *flags) as (process, start, lines, http), ThreadPoolExecutor() as others:
        with streaming(http) as (first, rest):
            process.send_signal(signal.SIGSTOP)
            late = others.submit(ask, http)
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{http.base_url}/health", timeout=6)
            process.send_signal(signal.SIGCONT)
            *chunks, done = [first, *rest]
        text = "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks)
        assert (done, late.result()) == ("data: [DONE]", text)
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"  # not where it is
        with file.open("r+b", 0) as mapped:
            mapped.write(b"\xff" * file.stat().st_size)
            assert ask(http) == text
            mapped.truncate(9)
            assert ask(http) == text
        assert http.get("/health").json()["status"] == "ok"
        gib = re.search(r": 8 requests at a time, of 1000000 tokens each, in (\S+) GiB;", start)[1]
        assert resident_bytes(process.pid) < 1.0 * GIB < 4.2 * GIB < float(gib) * GIB <= 5.2 * GIB
        with streaming(http, max_tokens=100_000) as (_, rest):
            process.send_signal(signal.SIGTERM)
            assert any("again to stop now" in line for line in lines)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.HTTPError):
                collections.deque(rest)
        assert process.wait(60) == 0
        said = "".join(lines)
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
