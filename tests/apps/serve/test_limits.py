"""No client can take what others need: places, connections, rows, time."""

import contextlib
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from minitri.apps.serve import answers, app, connections
from minitri.apps.serve.answers import Writer
from minitri.apps.serve.protocol import Protocol
from tests.apps.serve.conftest import serving
from tests.apps.serve.test_answers import PROMPT

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
            assert response.status_code == 503
            gate.set()
            server.wait_until_free()
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


KEYS = [{"host": "0.0.0.0"}, {"max_requests_per_client": 2}, {"api_key": "alice bob"}]


@pytest.mark.parametrize("access", KEYS, ids=lambda it: min(it))
def test_no_client_has_more_requests_than_its_share(engine, monkeypatch, access):
    """By default half of all. Clients are keys, or else addresses. What is refused is not read."""
    gate, read, texts = threading.Event(), Protocol.read, []
    monkeypatch.setattr(Protocol, "read", lambda *a, **b: texts.append(a[1]) or read(*a, **b))
    fields = {"model": "tiny", "prompt": "She had", "max_tokens": 1}
    own = {"before": lambda: gate.wait(20), "num_rows": 1, "max_queue": 3, **access}
    with serving(engine, **own) as server, ThreadPoolExecutor(3) as pool:
        first, other = server.client("127.0.0.2"), server.client("127.0.0.3")
        if "api_key" in access:
            first, other = first.copy(api_key="alice"), first.copy(api_key="bob")
        asked = [pool.submit(first.completions.create, **fields) for _ in range(2)]
        server.wait(lambda: server.service.num_open == 2)
        with pytest.raises(openai.RateLimitError, match="2 of them yours, of at most 2") as refused:
            first.completions.create(**fields | {"prompt": "One more"})
        assert refused.value.code == "rate_limit_exceeded"
        asked.append(pool.submit(other.completions.create, **fields))
        server.wait(lambda: server.service.num_open == 3)
        gate.set()
        assert all(it.result().usage for it in asked)
        server.wait_until_free()
        assert first.completions.create(**fields).usage
    assert not any(b"One more" in text for text in texts)


def test_many_requests_of_an_address_do_not_delay_that_of_another_one(engine):
    """All wait for one row: it is served after two of them at most."""
    gate, left = threading.Event(), []

    def before() -> None:
        gate.wait(20)
        left.append([job.requests[0].client for job in server.service.worker._jobs.values()])

    fields = {"model": "tiny", "max_tokens": 2, "extra_body": {"ignore_eos": True}}
    with serving(engine, before=before, num_rows=1) as server, ThreadPoolExecutor(21) as pool:
        many, one = server.client("127.0.0.2"), server.client("127.0.0.3")
        asked = [pool.submit(many.completions.create, prompt=[5], **fields) for _ in range(20)]
        server.wait(lambda: server.service.num_open == 20)
        asked.append(pool.submit(one.completions.create, prompt=[7] * 30, **fields))
        server.wait(lambda: len(server.service.worker._waiting) == 20)
        gate.set()
        assert all(it.result().usage for it in asked)
    seen = left[next(i for i, clients in enumerate(left) if "127.0.0.3" in clients) :]
    served = next(clients for clients in seen if "127.0.0.3" not in clients)
    assert served.count("127.0.0.2") >= 18


def test_stop_strings_take_no_time_of_others(server):
    """All of them are looked for after every token, by the thread that computes."""
    fields = {"prompt": "She had", "max_tokens": 3}
    for stop in (["x" * 1024], [f"{n:04d}" for n in range(256)]):
        assert server.post(**fields, stop=stop).status_code == 200
        response = server.post(**fields, stop=[*stop, "y"])
        assert response.status_code == 400
        assert "stop is " in response.text
        assert "at most 1024 characters" in response.text


def test_tokenizing_lets_other_threads_run(engine):
    """Also of a library that computes without Python: no thread is asked to let others run."""
    woken, ran = threading.Event(), []
    other = threading.Thread(target=lambda: woken.wait() and ran.append(True))
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        other.start()
        woken.set()
        engine.tokenizer.encode("She had " * 50_000)
        assert ran
    finally:
        sys.setswitchinterval(before)
        other.join()


def test_a_whole_answer_with_log_probabilities_is_worded_outside_of_the_loop(server, monkeypatch):
    threads, take = {}, Writer.take

    def watched(writer, index, event):
        threads.setdefault(type(event).__name__, set()).add(threading.get_ident())
        return take(writer, index, event)

    monkeypatch.setattr(Writer, "take", watched)
    fields = {"model": "tiny", "prompt": "She had", "max_tokens": 9}
    server.openai.completions.create(**fields, logprobs=20)
    [loop], [other] = threads["Token"], threads.pop("End")
    assert other != loop


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


def test_a_stream_that_waits_gives_signs_of_life(engine, monkeypatch):
    monkeypatch.setattr(app, "WAITING_SECONDS", 0.05)
    gate = threading.Event()
    fields = {"prompt": PROMPT, "max_tokens": 4, "seed": 3}
    with serving(engine, before=lambda: gate.wait(20), num_rows=1) as server:
        with server.raw(**fields, stream=True) as first, server.raw(**fields, stream=True) as last:
            server.wait(lambda: server.service.num_open == 2)
            for connection in (first, last):  # one has a row, the other waits for it
                received = b""
                while received.count(b": still at work\n\n") < 3:
                    received += connection.recv(1000)
            gate.set()
            server.wait_until_free()
        chunks = server.openai.completions.create(model="tiny", **fields, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks)
