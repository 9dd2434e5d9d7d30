"""Who may ask, and that nobody reads from counts what others ask."""

import contextlib
import threading

import pytest

from minitri.apps.serve.__main__ import build_parser, main
from minitri.apps.serve.access import Access
from tests.apps.serve.conftest import serving

KEYS = "alice", "bob"
SECRET = [20, 31, 42, 53, 64, 75]
"""How a prompt of Alice's begins."""
UNREAD = [9] * 17
"""The end of a prompt, which is always read anew."""


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def two_keys():
    return {"api_key": "alice bob"}


def num_cached(server, prompt: list[int], key: str = "bob", **fields) -> int:
    fields |= {"prompt": prompt, "max_tokens": 1}
    answer = server.http.post("/v1/completions", json=fields, headers=headers(key)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def guessed(engine, access, **fields) -> list[int]:
    """As much of a running prompt of Alice's as Bob finds, token by token: a prompt with the right
    next token has one more that is cached. She goes on only while he asks."""
    found: list[int] = []
    own = {"prompt": SECRET + [7] * 9, "max_tokens": 380, "ignore_eos": True, "stream": True}
    own |= {"speculation": False, "user": "Alice"}
    is_free = threading.Event()
    is_free.set()

    def before() -> None:
        server.wait(lambda: is_free.is_set() or server.service.num_open == 2)

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(engine, before=before, **access))
        url = "/v1/completions"
        running = server.http.stream("POST", url, json=own, headers=headers("alice"))
        lines = stack.enter_context(running).iter_lines()
        next(lines)
        is_free.clear()
        tokens = iter((11, *SECRET))
        while token := next(tokens, None):
            if num_cached(server, [*found, token, *UNREAD], **fields) > len(found):
                found.append(token)
                tokens = iter((11, *SECRET))
        server.wait(lambda: server.service.num_open == 1)  # hers
        is_free.set()
    return found


def test_the_prompts_of_another_key_cannot_be_guessed_from_counts(engine, two_keys):
    assert guessed(engine, two_keys | {"share_prefixes": True}) == SECRET
    assert guessed(engine, two_keys) == guessed(engine, two_keys, user="Alice") == []


def test_prompts_are_read_from_where_the_same_key_and_user_left_them(engine, two_keys):
    prompt = SECRET + UNREAD
    with serving(engine, **two_keys) as server:
        assert num_cached(server, prompt) == 0
        assert num_cached(server, prompt) == len(SECRET)
        for name in ("user", "safety_identifier", "prompt_cache_key"):
            assert num_cached(server, prompt, **{name: name}) == 0
            assert num_cached(server, prompt, **{name: name}) == len(SECRET)
        assert num_cached(server, prompt, "alice", user="user") == 0
    with serving(engine) as server:  # no keys: all of one household
        num_cached(server, prompt)
        assert num_cached(server, prompt, user="user") == len(SECRET)


def test_keys_are_asked_for_everywhere_but_at_health(engine, two_keys):
    with serving(engine, **two_keys | {"api_key": "clé alice bob"}) as server:
        assert server.http.get("/health").status_code == 200
        assert server.post(prompt="She had").status_code == 401
        right = ["Bearer clé", "bearer alice", "BEARER bob"]
        for given in (*right, "", "clé", "Bearer", "Bearer clef", "Basic bob", "Bearer #carol"):
            status = server.http.get("/v1/models", headers={"authorization": given.encode()})
            assert status.status_code == (200 if given in right else 401), given


def test_an_empty_key_is_refused_before_anything_is_loaded(call, monkeypatch):
    done = call(main, "--api-key", " ", "--model", "no-such-model")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "an API key is empty" in done.err
    monkeypatch.setenv("MINITRI_API_KEY", "")
    assert "an API key is empty" in call(main, "--model", "no-such-model").err


def test_a_server_that_all_may_ask_warns(call):
    anywhere = ("--port", 0, "--model", "no-such-model", "--host", "0.0.0.0")
    assert "--host is 0.0.0.0 and there is no key" in call(main, *anywhere).err
    assert "there is no key" not in call(main, *anywhere, "--api-key", "x").err
    assert "there is no key" not in call(main, *anywhere[:-2]).err


@pytest.mark.parametrize(
    ("host", "origin", "is_allowed"),
    [
        ("localhost:8000", None, True),
        ("LOCALHOST", None, True),
        ("127.0.0.1:8000", None, True),
        ("192.168.1.7:8000", None, True),
        ("[::1]:8000", None, True),
        ("llm.example", None, True),
        ("evil.example:8000", None, False),
        ("1.2.3.4.evil.example", None, False),
        ("localhost.evil.example", None, False),
        ("", None, False),
        ("localhost:8000", "http://localhost:8000", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "https://a.example", True),
        ("localhost:8000", "https://b.example", False),
        ("evil.example:8000", "http://evil.example:8000", False),
        ("localhost:8000", "null", False),
    ],
)
def test_pages_of_other_sites_may_not_ask(engine, host, origin, is_allowed):
    names = {"allowed_host": ["llm.example"], "allow_origin": ["https://a.example"]}
    with serving(engine, **names) as server:
        sent = {"host": host} | ({"origin": origin} if origin else {})
        paths = ("/v1/models", "/", "/docs", "/health", "/v1/completions", "/v2")
        answers = [server.http.get(path, headers=sent) for path in paths]
        fields = {"prompt": "She had", "max_tokens": 1}
        answers.append(server.http.post("/v1/completions", json=fields, headers=sent))
    code = 200 if is_allowed else 403
    codes = [answer.status_code for answer in answers]
    assert codes == [code, code, code, code, 405, 404, code]
    if not is_allowed:
        assert "see --allowed-host and --allow-origin" in answers[-1].json()["error"]["message"]
    allowed = answers[0].headers.get("access-control-allow-origin")
    assert allowed == (origin if origin == "https://a.example" else None)


def test_a_preflight_is_answered_for_the_origins_that_may_ask(engine):
    asked = {"access-control-request-method": "POST", "origin": "https://a.example"}
    asked |= {"access-control-request-headers": "authorization, content-type"}
    url = "/v1/chat/completions"
    with serving(engine, allow_origin=["https://a.example"], api_key="x") as server:
        answer = server.http.options(url, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
    with serving(engine) as server:
        answer = server.http.options(url, headers=asked)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in answer.headers


def test_flags_are_the_fields_of_access():
    flags = "--allowed-host a --allowed-host b --share-prefixes --host 0.0.0.0"
    args = build_parser().parse_args(flags.split())
    assert (args.allowed_host, args.host) == (["a", "b"], "0.0.0.0")
    assert args.share_prefixes
    assert Access().digests == set()
