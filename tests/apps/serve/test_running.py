"""The program from its start to its end, and many clients at a time: no row, no text is lost."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from minitri.apps.serve.__main__ import build_parser, main
from tests.apps.serve.conftest import serving
from tests.apps.serve.test_answers import PROMPT, complete, own_text


def test_a_client_that_leaves_frees_its_row(engine, caplog):
    """Also one that leaves before its row runs, or while it reads a stream."""
    gate, turns = threading.Event(), iter(range(2))
    before = lambda: next(turns, None) is None and gate.wait(20)  # noqa: E731
    caplog.set_level("INFO", logger="minitri")
    with serving(engine, before=before, num_rows=1) as server:
        fields = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with server.raw(**fields) as reader:
            assert reader.recv(12) == b"HTTP/1.1 200"
            with server.raw(**fields):
                server.wait(lambda: server.service.num_open == 2)
        server.wait(lambda: server.service.num_open == 0)
        gate.set()
        server.wait_until_free()
        assert caplog.text.count(": left after") == 2
        assert complete(server, max_tokens=2).choices[0].text == own_text(engine, num=2)


def test_a_seed_gives_the_same_text_alone_and_under_load(server, engine):
    """Every fourth client vanishes in the middle of its text."""

    def ask(number: int) -> str | None:
        fields = {"prompt": PROMPT[: 10 + number], "seed": number, "max_tokens": 20 + number}
        if number % 4 < 3:
            return complete(server, **fields).choices[0].text
        stream = complete(server, **fields | {"max_tokens": 300}, stream=True)
        next(iter(stream))
        return stream.close()

    with ThreadPoolExecutor(12) as clients:
        texts = [*clients.map(ask, range(12))]
    for number, text in enumerate(texts):
        alone = own_text(engine, PROMPT[: 10 + number], seed=number, num=20 + number)
        assert text in (alone, None), number
    assert texts.count(None) == 3
    server.wait_until_free()


def test_a_port_that_is_taken_is_one_line_before_the_model_is_read(call):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = call(main, "--port", port, "--model", "no-such-model")
    [line] = done.err.splitlines()
    assert done.code == 2
    assert f"cannot listen at 127.0.0.1, port {port}" in line


def test_requests_are_sampled_unless_they_say_otherwise():
    assert build_parser().parse_args([]).temperature == 1.0
    assert "(default: 1.0)" in build_parser().format_help()
