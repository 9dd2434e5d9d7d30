"""Faults, put in one by one: what each client sees, and that the others and later ones go on.

worker raises RuntimeError        | 500, a bug           | test_whatever_the_worker_raises_its_
worker raises MemoryError         | 503, shorten         | test_whatever_the_worker_raises_its_
worker raises SystemExit          | 503, ask again       | test_whatever_the_worker_raises_its_
worker raises KeyboardInterrupt   | 503, ask again       | test_whatever_the_worker_raises_its_
open_run always fails             | 500; /health 503     | test_while_no_run_can_be_opened_
worker makes no progress          | 503; /health 503     | test_a_worker_that_makes_no_progress_
SIGSTOP for 3 s, for 70 s         | the text, later      | test_a_server_that_stands_still_
NaN in one row of four            | 503; others: texts   | test_a_row_that_is_not_finite_fails_alone
NaN in one row's draft            | an error             | test_one_row_of_four_fails_alone_
memory is short for a prompt      | an error             | test_a_prompt_for_which_memory_is_short_
RST when connected                | -                    | test_connections_that_are_reset_
RST in the head                   | -                    | test_connections_that_are_reset_
RST in the body                   | -                    | test_connections_that_are_reset_
RST when asked                    | -                    | test_connections_that_are_reset_
RST while it streams              | -                    | test_connections_that_are_reset_
half-closed socket                | it has left          | test_a_client_that_closes_its_side_
pipelined posts                   | all their answers    | test_posts_in_one_piece
Content-Length, Transfer-Encoding | chunks count         | test_posts_in_one_piece
Content-Length twice              | 400                  | test_posts_in_one_piece
body that has no end              | 413 or 408           | test_a_body_that_is_too_long_or_does_
connection that is silent         | closed               | test_hundreds_of_silent_connections_
stream that is not read           | closed               | test_a_stream_that_is_not_read_
SIGTERM while streaming           | the text; later: 503 | test_a_signal_while_a_text_is_streamed
SIGTERM twice, Ctrl-C twice       | closed               | test_a_signal_while_a_text_is_streamed
fork of the process               | an error at once     | test_a_forked_process_is_told_so_
full tmpfs while saving           | one line, old file   | test_on_a_full_disk_the_old_file_stays
kill -9 while saving              | old file or new one  | test_a_writer_that_is_killed_leaves_
two savers                        | file of one          | test_of_two_who_save_at_once_
snapshot overwritten while in use | the text             | test_a_file_that_is_cut_or_overwritten_
weights overwritten while in use  | the text             | test_weights_that_are_overwritten_
"""

import itertools
import re
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.decoding.sampling import log_probs, probs_of_rows
from minitri.worker import NUM_TICKS
from tests.apps.serve.conftest import serving
from tests.apps.serve.test_answers import PROMPT, complete, own_text

FAULTS = [line.split("|") for line in __doc__.splitlines() if "|" in line]
BODY = b'{"prompt": "She had", "max_tokens": 1, "seed": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
POST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LAST = POST.replace(b"Host: localhost\r\n", b"Host: localhost\r\nConnection: close\r\n")
BOTH = HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"


def is_well(server, engine) -> bool:
    """Whether another client gets the text of its own."""
    return complete(server).choices[0].text == own_text(engine)


@pytest.mark.parametrize(
    ("fault", "status", "seen"),
    [
        (RuntimeError("broken"), 500, "a bug: RuntimeError('broken')"),
        (MemoryError("no room"), 503, "cpu has run out of memory (no room); shorten the prompt"),
        (SystemExit(3), 503, "the run was stopped by SystemExit(3); ask again"),
        (KeyboardInterrupt(), 503, "the run was stopped by KeyboardInterrupt(); ask again"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, BaseException) else "",
)
def test_whatever_the_worker_raises_its_requests_are_told_and_another_run_is_opened(
    engine, caplog, fault, status, seen
):
    faults = []

    def fail():
        if faults:
            raise faults.pop()

    with serving(engine, before=fail) as server:
        with ThreadPoolExecutor(3) as clients:
            faults.append(fault)
            answers = [*clients.map(lambda _: server.post(prompt="She had"), range(3))]
        failed = [it for it in answers if it.status_code != 200]
        assert {it.status_code for it in failed} == {status}
        assert seen in failed[0].text
        assert ("the run failed" in caplog.text) != isinstance(fault, MemoryError)
        server.wait_until_free()
        assert server.http.get("/health").status_code == 200
        assert is_well(server, engine)


def test_while_no_run_can_be_opened_health_says_so(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    faults = [fail]
    with serving(engine, before=lambda: faults and faults.pop()()) as server:
        worker = server.service.worker
        with monkeypatch.context() as patching:
            patching.setattr(worker, "_open", fail)
            assert [server.post(prompt="She had").status_code for _ in range(3)] == [500] * 3
            health = server.http.get("/health")
            assert health.status_code == 503
            assert "no other is open: RuntimeError('broken')" in health.json()["status"]
        assert is_well(server, engine)
        server.wait_until_free()
        assert server.http.get("/health").json() == {"status": "ok", "requests": 0}


def test_a_worker_that_makes_no_progress_fails_its_requests_until_it_does(engine):
    gate = threading.Event()
    with serving(engine, before=gate.wait, num_rows=1) as server, ThreadPoolExecutor(2) as clients:
        worker = server.service.worker
        asked = [clients.submit(server.post, prompt="She had", stream=s) for s in (True, False)]
        server.wait(lambda: len(worker._waiting) + len(worker._jobs) == 2)
        for _ in range(NUM_TICKS - 1):
            worker.tick()
        assert server.http.get("/health").status_code == 200
        worker.tick()
        stream, whole = [it.result() for it in asked]
        assert "makes no progress" in stream.text
        assert whole.status_code == 503
        assert server.post(prompt="She had").status_code == 503
        health = server.http.get("/health")
        assert health.status_code == 503
        assert "makes no progress" in health.json()["status"]
        gate.set()
        server.wait(lambda: server.http.get("/health").status_code == 200)
        assert is_well(server, engine)


def test_a_row_that_is_not_finite_fails_alone(server, engine):
    """Three others have the texts that they have by themselves, and so has it when it is mended."""
    sick = "£"
    [*_, token] = engine.tokenizer.encode(sick)
    with torch.inference_mode():
        row = engine.model.embed_tokens[token]
        sound = row.clone()
        prompts = [PROMPT, sick, PROMPT[:9], PROMPT[:20]]
        alone = [own_text(engine, prompt) for prompt in prompts]
        try:
            row.fill_(torch.nan)
            asked = [{"prompt": it, "max_tokens": 24, "seed": 7} for it in prompts]
            with ThreadPoolExecutor(4) as clients:
                answers = [*clients.map(lambda fields: server.post(**fields), asked)]
            stream = server.post(**asked[1], stream=True)
        finally:
            row.copy_(sound)
    assert "computed logits that are not finite" in answers[1].json()["error"]["message"]
    assert "computed logits that are not finite" in stream.text
    assert [it.status_code for it in answers] == [200, 503, 200, 200]
    texts = [it.json()["choices"][0]["text"] for it in answers if it.status_code == 200]
    assert texts == [alone[0], *alone[2:]]
    assert complete(server, prompt=sick).choices[0].text == alone[1]


def short(function, is_short, error):
    """The function with this error where memory is short."""

    def call(*args):
        if is_short(*args):
            raise error
        return function(*args)

    return call


NO_MEMORY = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")]
NO_MEMORY += [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99")]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["GPU", "CPU"])
def test_rows_for_which_memory_is_short_fail_alone(server, engine, monkeypatch, error):
    """One by its log-probabilities, one by its rebuild; others have the texts of their own."""
    prompts = [PROMPT, PROMPT[:9], PROMPT * 8, PROMPT[:20]]
    asked = [{"prompt": it, "seed": 7, "max_tokens": 24, "logprobs": 2} for it in prompts]
    asked[1]["logprobs"] = 5
    run = server.service.worker._run
    with monkeypatch.context() as patching, ThreadPoolExecutor(4) as clients:
        scores = short(log_probs, lambda *it: it[2] == 5, error)
        patching.setattr("minitri.core.generation.log_probs", scores)
        commit = short(RetrievalCache.commit, lambda it, b, _: it._full.lengths[b] > 100, error)
        patching.setattr(RetrievalCache, "commit", commit)
        answers = [*clients.map(lambda fields: server.post(**fields), asked)]
    assert [it.status_code for it in answers] == [200, 503, 503, 200]
    assert all("has run out of memory (" in it.text for it in answers[1:3])
    answers[1:3] = [server.post(**fields) for fields in asked[1:3]]
    texts = [it.json()["choices"][0]["text"] for it in answers]
    assert texts == [own_text(engine, prompt) for prompt in prompts]
    assert server.service.worker._run is run


@pytest.mark.parametrize("number", range(4))
def test_a_pass_for_which_memory_is_short_fails_its_run_whose_prefixes_stay(
    engine, monkeypatch, number
):
    """The first pass of a text, one of the retrieval level, or one that verifies."""
    passes = itertools.count()
    with serving(engine) as server:
        before = complete(server, prompt=PROMPT * 4).choices[0].text
        run = server.service.worker._run
        with monkeypatch.context() as patching, ThreadPoolExecutor(3) as clients:
            probs = short(probs_of_rows, lambda *_: next(passes) == number, MemoryError("scratch"))
            patching.setattr("minitri.core.runner.probs_of_rows", probs)
            answers = [*clients.map(lambda it: server.post(prompt=it), ("I", "We", "They"))]
        [why] = {it.json()["error"]["message"] for it in answers if it.status_code == 503}
        assert "cpu has run out of memory (scratch)" in why
        assert server.service.worker._run is not run
        again = complete(server, prompt=PROMPT * 4)
        assert again.choices[0].text == before == own_text(engine, PROMPT * 4)
        assert again.usage.prompt_tokens_details.cached_tokens > 40


STREAM = b'{"prompt": "She had", "max_tokens": 300, "ignore_eos": true, "stream": true}'
PHASES = {
    "connected": (b"", 0),
    "half a head": (HEAD[:40], 0),
    "half a body": (POST[:-9], 0),
    "asked": (POST, 0),
    "while it streams": (HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM, 100),
}


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", PHASES)
def test_connections_that_are_reset_leave_nothing(server, engine, phase, count):
    sent, num_read = PHASES[phase]
    text = own_text(engine)
    for number in range(count):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(sent)
            if num_read:
                client.recv(num_read)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert number % 10 or complete(server).choices[0].text == text
    server.wait_until_free()


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (POST + LAST, ["200", "200"]),
        (BOTH + b"0\r\n\r\n" + LAST, ["400", "200"]),
        (BOTH + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n" + LAST, ["200", "200"]),
        (POST.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n"), ["400"]),
    ],
    ids=["pipelined", "an empty chunk and another post", "chunks", "two lengths"],
)
def test_posts_in_one_piece(server, engine, sent, statuses):
    """Where both a length and chunks are told, the chunks count."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(4096), b""))
    assert re.findall(r"HTTP/1.1 (\d+)", received.decode()) == statuses
    assert is_well(server, engine)
    server.wait_until_free()


def test_a_client_that_closes_its_side_has_left(server, engine):
    """An ASGI server cannot tell it from one that is gone: its row is free at once."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(PHASES["while it streams"][0])
        client.shutdown(socket.SHUT_WR)
        server.wait_until_free()
        assert is_well(server, engine)


def test_every_fault_of_the_list_has_a_test():
    texts = [file.read_text() for file in Path(__file__).parents[2].rglob("test_*.py")]
    names = {name.strip() for _, _, name in FAULTS}
    assert len(FAULTS) == 30
    assert {it for it in names if not any(f"\ndef {it}" in text for text in texts)} == set()
