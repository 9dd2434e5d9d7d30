"""Many clients at a time, some of which vanish: no row is lost, no text changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.serve.conftest import serving
from tests.serve.test_completions import PROMPT, complete, own_text

NUM_CLIENTS = 12


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
        prompt = PROMPT[: 10 + number]
        if number % 4 == 3:
            stream = complete(server, prompt=prompt, seed=number, max_tokens=300, stream=True)
            next(iter(stream))
            stream.close()
            return None
        fields = {"prompt": prompt, "seed": number, "max_tokens": 20 + number}
        return complete(server, **fields).choices[0].text

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        texts = [*clients.map(ask, range(NUM_CLIENTS))]
    for number, text in enumerate(texts):
        if text is not None:
            alone = own_text(engine, PROMPT[: 10 + number], seed=number, num=20 + number)
            assert text == alone, number
    server.wait_until_free()
