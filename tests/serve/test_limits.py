"""No client can take what others need: places, connections, rows, time."""

import contextlib
import socket
import threading

import openai
import pytest

from minitri.serve import answers, app, connections
from minitri.serve.protocol import Protocol
from tests.serve.conftest import serving
from tests.serve.test_answers import PROMPT

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Waits until it is, or something comes."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_request_counts_while_its_prompt_is_tokenized(engine, monkeypatch):
    gate = threading.Event()
    read = Protocol.read

    def wait_and_read(*args, **options):
        gate.wait(20)
        return read(*args, **options)

    monkeypatch.setattr(Protocol, "read", wait_and_read)
    with serving(engine, num_rows=1, max_queue=1) as server:
        with server.raw(prompt="She had"), server.raw(prompt=""):
            server.wait(lambda: server.service.num_open == 2)
            response = server.post(prompt="She had")
            assert (response.status_code, "x-should-retry" in response.headers) == (503, False)
            gate.set()
            server.wait_until_free()
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_a_place_is_free_again_when_a_request_cannot_start(engine):
    with serving(engine, num_rows=1, max_queue=1) as server:
        server.service.worker._thread.shutdown()
        for _ in range(3):
            assert server.post(prompt="She had").status_code == 503
        assert server.service.num_open == 0


def test_hundreds_of_silent_connections_do_not_stop_a_request(engine, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 2)
    with serving(engine) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(300)]
        for connection in silent[::2]:
            connection.sendall(HEAD)  # and no end of it
        assert server.post(prompt="She had", max_tokens=1).status_code == 200
        assert all(map(is_closed, silent))
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_a_connection_that_has_asked_is_not_closed_while_it_waits(engine, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 1)
    gate = threading.Event()
    with serving(engine, before=lambda: gate.wait(20)) as server:
        with server.raw(prompt="She had", max_tokens=1) as connection:
            connection.settimeout(2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            gate.set()
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_long_headers_are_refused(server):
    with connect(server) as connection:
        connection.sendall(HEAD + b"x: " + b"y" * 100_000)
        assert connection.recv(12) == b"HTTP/1.1 400"


def test_a_stream_that_is_not_read_ends_and_frees_its_row(engine, monkeypatch, caplog):
    """It has more than sockets hold, and its row goes on only when the request has ended."""
    monkeypatch.setattr(connections, "SECONDS", 1)
    monkeypatch.setattr(answers, "in_stream", lambda _: b"data: " + b"x" * 1_000_000)
    caplog.set_level("INFO", logger="minitri")
    turns = iter(range(30))
    fields = {"prompt": PROMPT, "max_tokens": 380, "ignore_eos": True, "stream": True}

    def before() -> None:
        if next(turns, None) is None:
            server.wait(lambda: server.service.num_open == 0)

    with serving(engine, before=before, num_rows=1) as server:
        with server.raw(**fields) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            server.wait_until_free()
        assert caplog.text.count(": left after") == 1


def test_a_stream_that_waits_gives_signs_of_life(engine, monkeypatch):
    monkeypatch.setattr(app, "WAITING_SECONDS", 0.05)
    gate = threading.Event()
    fields = {"prompt": PROMPT, "max_tokens": 4, "seed": 3}
    with serving(engine, before=lambda: gate.wait(20), num_rows=1) as server:
        with server.raw(**fields, stream=True) as first, server.raw(**fields, stream=True) as last:
            server.wait(lambda: server.service.num_open == 2)
            for connection in (first, last):  # one has a row, the other waits for it
                received = b""
                while received.count(b": waiting\n\n") < 3:
                    received += connection.recv(1000)
            plain = server.raw(**fields)  # which has no place for it
            gate.set()
            server.wait_until_free()
        with plain:
            assert b": waiting" not in plain.recv(10_000)
        chunks = server.openai.completions.create(model="tiny", **fields, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks)


def test_clients_are_told_where_a_retry_cannot_help(engine):
    failures = [RuntimeError("broken")]

    def fail():
        if failures:
            raise failures.pop()

    with serving(engine, before=fail) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=2)
        with client, pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="She had")
        assert server.post(prompt="").headers["x-should-retry"] == "false"
        assert "x-should-retry" not in server.post(prompt="She had", max_tokens=1).headers


def test_more_connections_than_files_close_silent_ones(engine, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 20)
    with serving(engine) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(40)]
        assert server.post(prompt="She had", max_tokens=1).status_code == 200
        server.wait(lambda: sum(map(is_closed_now, silent)) >= 20)


def is_closed_now(connection) -> bool:
    connection.settimeout(0.05)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
