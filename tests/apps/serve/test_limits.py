"""Who may ask; no client can take what others need: places, connections, rows, time; and nobody
reads from counts what others ask."""

import contextlib
import select
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from minitri.apps.cli.documents import MAX_BYTES
from minitri.apps.serve import app
from minitri.text import matcher
from tests.apps.chat.test_documents import RUSSIAN, pdf
from tests.apps.serve.conftest import ENDLESS, Gate, complete, own_text, post_of, serving

HEAD = post_of(b"").partition(b"Content-Length")[0]


@pytest.fixture
def tokenizing(engine, monkeypatch):
    """A gate for the tokenizer, and the texts that came to it."""
    gate = Gate(0)
    texts = []
    encode = engine.tokenizer.encode

    def wait_and_encode(text: str) -> list[int]:
        texts.append(text)
        gate()
        return encode(text)

    monkeypatch.setattr(engine.tokenizer, "encode", wait_and_encode)
    return gate, texts


KEYS = {"key": "alice"}, {"key": "bob"}
SOURCES = {"source": "127.0.0.2"}, {"source": "127.0.0.3"}
ACCESS = [{"host": "0.0.0.0"}, {"max_requests_per_client": 2}, {"api_key": "alice bob"}]


@pytest.mark.parametrize("access", ACCESS, ids=lambda access: min(access))
def test_no_client_has_more_requests_than_its_share(server, tokenizing, access):
    """A share is half of all by default; clients are keys, or else addresses. Requests count before
    their prompts are tokenized; what is refused is not read."""
    gate, texts = tokenizing
    first, other = KEYS if "api_key" in access else SOURCES
    with server.limited(max_open=4, **access), ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.post, prompt="She had", **first) for _ in range(2)]
        server.wait_for(num_open=2)
        refused = [server.post(prompt="One more", **first)]
        asked += [clients.submit(server.post, prompt="She had", **other) for _ in range(2)]
        server.wait_for(num_open=4)
        refused.append(server.post(prompt="One more", **other))
        gate.set()
        assert [it.result().status_code for it in asked] == [200] * 4
        assert server.post(prompt="She had", **first).status_code == 200
        for fields in ({"n": 3}, {"prompt": ["She"] * 3}):
            answer = server.post(**{"prompt": "She"} | fields, **first)
            assert (answer.status_code, "ask for less" in answer.text) == (429, True)
    assert [it.status_code for it in refused] == [429, 503]
    assert "2 are yours (at most 4, and 2)" in refused[0].text
    assert [it.json()["error"]["code"] for it in refused] == ["rate_limit_exceeded", "queue_full"]
    assert "One more" not in texts


def test_a_request_has_its_client_and_the_owner_of_its_prefix(scripted, run):
    """Rows are given to clients in turn (`tests/core/test_fairness.py`): keys, or else addresses.
    Texts begin with what the same owner left (`tests/test_stream.py`): a key."""

    def asked(**sender) -> tuple[str, str]:
        scripted.post(prompt="a", **sender).raise_for_status()
        return run.requests[-1].client, run.requests[-1].owner

    one, two = SOURCES
    assert asked(**one)[0] != asked(**two)[0]
    assert asked(**one)[1] == asked(**two)[1]
    alice, bob = KEYS
    with scripted.limited(api_key="alice bob"):
        assert asked(**alice, **one) == asked(**alice, **two)
        assert all(map(str.__ne__, asked(**alice), asked(**bob)))
        users = [asked(**alice, user=user)[1].encode() for user in ("a", "b", "\ud800")]
        assert len({*users, asked(**alice)[1].encode()}) == 4
    with scripted.limited(api_key="alice bob", share_prefixes=True):
        assert asked(**alice)[1] == asked(**bob)[1]


def test_a_client_that_leaves_frees_its_rows(server, engine, caplog):
    """Clients leave before their rows run, while they read, or close only their side."""
    caplog.set_level("INFO", logger="minitri")
    with server.held(num_free=3):
        with server.raw(**ENDLESS, n=2) as reader:
            assert reader.recv(12) == b"HTTP/1.1 200"  # of the free steps others may take all
            with server.raw(**ENDLESS) as closing, server.raw(**ENDLESS, n=4) as waiting:
                server.wait_for(num_open=7)
                waiting.close()
                closing.shutdown(1)
                server.wait_for(num_open=2)
        server.wait_for(num_open=0)
    num_before = server.runs[-1].run.stats.num_generated_tokens
    assert complete(server).choices[0].text == own_text(engine)
    assert server.runs[-1].run.stats.num_generated_tokens - num_before < 100
    assert caplog.text.count(": left after") == 3


def is_closed(connection) -> bool:
    """Whether a connection is closed, once that or a byte has come."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_silent_connections_are_closed_but_none_that_has_asked(server, monkeypatch):
    """Many silent ones, half with a part of a head, do not stop a request; another waits for longer
    than a connection may be silent."""
    monkeypatch.setattr(app, "SECONDS", 1)
    with server.held() as gate, server.raw(prompt="a") as asked, contextlib.ExitStack() as stack:
        sent = (b"", HEAD) * 50
        silent = [stack.enter_context(server.connect(part)) for part in sent]
        assert server.http.get("/health").status_code == 200
        assert all(map(is_closed, silent))
        gate.set()
        assert asked.recv(12) == b"HTTP/1.1 200"


def test_more_connections_than_files_close_silent_ones(server, monkeypatch):
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 20)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(40)]
        assert server.post(prompt="She had", max_tokens=1).status_code == 200
        server.wait(lambda: len(select.select(silent, [], [], 0)[0]) >= 20)  # of any age


def test_what_is_too_long_or_does_not_end_is_refused(server, monkeypatch):
    with server.connect(HEAD + b"x: " + b"y" * 100_000) as connection:
        assert connection.recv(12) == b"HTTP/1.1 400"
    with server.connect(post_of(b" " * 2_000_000, missing=10**8)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 413"
    refused = server.post(prompt="x" * 70_000)  # no prompt that fits is so long
    assert (refused.status_code, "65536 bytes" in refused.json()["error"]["message"]) == (413, True)
    assert server.post(prompt="She had", max_tokens=1).status_code == 200
    monkeypatch.setattr(app, "SECONDS", 0.1)
    with server.connect(post_of(b'{"prompt"', missing=9)) as connection:
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_stream_that_is_not_read_ends_and_frees_its_row(engine, monkeypatch, caplog):
    """Chunks with a long model name are more than sockets hold."""
    caplog.set_level("INFO", logger="minitri")
    with serving(engine, name="x" * 1_000_000) as server:
        with server.held() as gate, server.raw(**ENDLESS):
            server.wait(lambda: gate.is_reached)
            monkeypatch.setattr(app, "SECONDS", 0.1)
            gate.set()
            server.wait_for(num_open=0)
    assert caplog.text.count(": left after") == 1


def test_a_stream_that_waits_gives_signs_of_life(server, monkeypatch):
    monkeypatch.setattr(app, "WAITING_SECONDS", 0.05)
    fields = {"prompt": "She had", "max_tokens": 2, "stream": True}
    with server.held() as gate, server.raw(**fields, n=4) as first, server.raw(**fields) as last:
        server.wait_for(num_open=5)
        for connection in (first, last):  # one has all rows, the other waits for one
            received = b""
            while received.count(b": still at work\n\n") < 3:
                received += connection.recv(1000)
        gate.set()


def test_grammars_of_clients_that_leave_keep_nobody_waiting(server, monkeypatch):
    gate, probe = Gate(0), Mock(side_effect=lambda *_: gate() or "")
    monkeypatch.setattr(matcher, "probe", probe)
    forms = [{"structured_outputs": {"regex": f"a{{{n}}}"}} for n in range(1, 41)]
    with contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        stack.callback(server.wait_for, 0)
        for form in forms:
            stack.enter_context(server.raw(prompt="a", **form))
        server.wait_for(num_open=40)
        assert server.post(prompt="She had", max_tokens=1).status_code == 200
        assert "exceed" in server.post(prompt="She " * 5000, **forms[0]).text
    assert server.post(prompt="a", **forms[4]).json()["choices"][0]["text"] == "aaaaa"
    assert probe.call_count <= 3


def post_file(server, content: bytes, **headers: str):
    return server.http.post("/v1/documents", content=content, headers=headers)


def test_files_are_read_as_the_chat_reads_them(server, engine):
    texts = {"PDF": ("It was dark.", pdf("It was dark.")), "": (RUSSIAN, RUSSIAN.encode())}
    texts |= {"koi8_r": (RUSSIAN, RUSSIAN.encode("koi8-r"))}
    for encoding, (text, content) in texts.items():
        num_tokens = len(engine.tokenizer.encode_marked(text))
        answer = {"text": text, "format": encoding, "num_tokens": num_tokens}
        assert post_file(server, content).json() == answer
    refused = [post_file(server, b"a\0b"), post_file(server, b"a", origin="https://a.example")]
    refused += [post_file(server, b"--x", **{"content-type": "multipart/form-data; boundary=x"})]
    refused.append(post_file(server, b" " * (MAX_BYTES + 1)))
    with server.limited(**API_KEYS):
        refused.append(post_file(server, b"a"))
    assert [answer.status_code for answer in refused] == [400, 415, 415, 413, 401]
    assert "cannot be read" in refused[0].json()["error"]["message"]


@pytest.mark.slow
def test_a_file_that_takes_too_much_memory_ends_no_server(server):
    """HTML whose elements take gigabytes."""
    assert post_file(server, b"<html>" + b"<p>" * 5_000_000).status_code == 400
    assert server.post(prompt="She had", max_tokens=1).status_code == 200


API_KEYS = {"api_key": "clé alice bob"}


def test_keys_are_asked_for_everywhere_but_at_health(server):
    with server.limited(**API_KEYS):
        assert server.http.get("/health").status_code == 200
        refused = server.post(prompt="She had", key="carol")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.http.get("/metrics").status_code == 401
        right = ["Bearer clé", "bearer alice", "BEARER bob"]
        for given in (*right, "", "clé", "Bearer", "Bearer clef", "Basic bob", "Bearer #carol"):
            answer = server.http.get("/v1/models", headers={"authorization": given.encode()})
            assert answer.status_code == (200 if given in right else 401), given


HOSTS = {"LOCALHOST:8000": 200, "llm.example": 200, "[::1]:8000": 200, "evil.example:8000": 403}
HOSTS |= {"1.2.3.4.localhost.evil.example": 403}


def test_pages_of_other_sites_may_not_ask(engine, server):
    """The header Host decides, and preflights of a browser, which a body of JSON needs."""
    fields = {"prompt": "She had", "max_tokens": 1}
    site = "https://a.example"
    asked = {"access-control-request-method": "POST", "origin": site}
    asked |= {"access-control-request-headers": "authorization, content-type"}
    with serving(engine, allowed_host=["llm.example"], allow_origin=[site]) as strict:
        for host, code in HOSTS.items():
            models = strict.http.get("/v1/models", headers={"host": host})
            answer = strict.http.post("/v1/completions", json=fields, headers={"host": host})
            assert (models.status_code, answer.status_code) == (code, code), host
        assert "--allowed-host" in answer.json()["error"]["message"]
        answer = strict.http.options("/v1/completions", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, site)
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert server.http.options("/v1/completions", headers=asked).status_code == 400
    answer = server.http.get("/v1/models", headers={"origin": site})
    assert "access-control-allow-origin" not in answer.headers
