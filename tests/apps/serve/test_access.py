"""Access: who may ask, and that nobody reads from counts what others ask."""

from tests.apps.serve.conftest import serving

PROMPT = [75, 64, 53, 42, 31, 20]
UNREAD = [9] * 17
"""The end of a prompt, which is always read anew."""
KEYS = {"api_key": "clé alice bob"}


def num_cached(server, key="bob", **fields) -> int:
    answer = server.post(key=key, prompt=[*PROMPT, *UNREAD], max_tokens=1, **fields).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prompts_are_read_from_where_the_same_key_and_user_left_them(server):
    """Else a prompt with the right next token would have one more that is cached. Texts that run do
    not count, either: `tests/test_stream.py`."""
    users = [{name: name} for name in ("user", "safety_identifier", "prompt_cache_key")]
    with server.limited(**KEYS):
        for fields in ({}, *users, {"key": "alice", "n": 3}, {"key": "alice", **users[0]}):
            counts = [num_cached(server, **fields) for _ in range(2)]
            assert counts == [0, len(PROMPT)]
    with server.limited(**KEYS, share_prefixes=True):
        num_cached(server)
        assert num_cached(server, key="alice", user="new") == len(PROMPT)
    num_cached(server)  # without keys all users are of one household
    assert num_cached(server, user="user") == len(PROMPT)


def test_keys_are_asked_for_everywhere_but_at_health(server):
    with server.limited(**KEYS):
        assert server.http.get("/health").status_code == 200
        refused = server.post(prompt="She had", key="carol")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        right = ["Bearer clé", "bearer alice", "BEARER bob"]
        for given in (*right, "", "clé", "Bearer", "Bearer clef", "Basic bob", "Bearer #carol"):
            answer = server.http.get("/v1/models", headers={"authorization": given.encode()})
            assert answer.status_code == (200 if given in right else 401), given


SITES = [  # headers Host and Origin, and whether they may ask
    ("LOCALHOST:8000", None, True),
    ("llm.example", None, True),
    ("[::1]:8000", None, True),
    ("evil.example:8000", None, False),
    ("1.2.3.4.localhost.evil.example", None, False),
    ("localhost:8000", "http://localhost:8000", True),
    ("localhost:8000", "http://localhost:3000", False),
    ("localhost:8000", "https://a.example", True),
    ("evil.example:8000", "http://evil.example:8000", False),
    ("localhost:8000", "null", False),
]


def test_pages_of_other_sites_may_not_ask(engine, server):
    """Headers Host and Origin decide, in requests and in preflights."""
    fields = {"prompt": "She had", "max_tokens": 1}
    site = "https://a.example"
    asked = {"access-control-request-method": "POST", "origin": site}
    asked |= {"access-control-request-headers": "authorization, content-type"}
    with serving(engine, allowed_host=["llm.example"], allow_origin=[site]) as strict:
        for host, origin, is_allowed in SITES:
            sent = {"host": host} | ({"origin": origin} if origin else {})
            paths = ("/v1/models", "/", "/docs", "/health")
            answers = [strict.http.get(path, headers=sent) for path in paths]
            answers.append(strict.http.post("/v1/completions", json=fields, headers=sent))
            code = 200 if is_allowed else 403
            assert [answer.status_code for answer in answers] == [code] * 5, sent
            assert is_allowed or "--allow-origin" in answers[-1].json()["error"]["message"]
            allowed = answers[0].headers.get("access-control-allow-origin")
            assert allowed == (site if origin == site else None)
        answer = strict.http.options("/v1/completions", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, site)
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert server.http.options("/v1/completions", headers=asked).status_code == 400
