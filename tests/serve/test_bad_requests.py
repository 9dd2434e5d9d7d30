"""Whatever a client sends, it gets one clear error, and the server goes on."""

import json
import threading

import openai
import pytest

from minitri.errors import InputError
from tests.serve.conftest import CONTEXT, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, ["the prompt is empty", "give"]),
        ({"prompt": 5}, ["'prompt' is 5", "give"]),
        ({"prompt": ["a", "b"]}, ["give one text"]),
        ({"prompt": [1, True]}, ["[1, True]", "token ids"]),
        ({"prompt": [1, 320]}, ["token id 320", "0 to 319"]),
        ({"prompt": [1, -1]}, ["token id -1"]),
        ({"n": 2}, ["'n' is 2", "not supported", "give 1"]),
        ({"echo": True}, ["'echo' is True", "not supported"]),
        ({"max_tokns": 3}, ["'max_tokns' is 3", "unknown", "max_tokens"]),
        ({"max_tokens": "3"}, ["'max_tokens' is '3'", "int"]),
        ({"max_tokens": True}, ["'max_tokens' is True"]),
        ({"max_tokens": 0}, ["max_new_tokens is 0", "from 1"]),
        ({"max_tokens": 10**30}, ["max_tokens", f"room for {CONTEXT}"]),
        ({"temperature": "hot"}, ["temperature is 'hot'", "a number"]),
        ({"temperature": -1}, ["temperature is -1"]),
        ({"top_p": 0}, ["top_p is 0"]),
        ({"top_k": 1.5}, ["top_k is 1.5"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"seed": 1.0}, ["'seed' is 1.0"]),
        ({"logprobs": 21}, ["logprobs is 21", "20"]),
        ({"logprobs": True}, ["logprobs is True"]),
        ({"stop": [""]}, ["at least one character"]),
        ({"stop": [1]}, ["stop is [1]"]),
        ({"stop": ["x" * 1001]}, ["1000 characters"]),
        ({"stop": ["a"] * 17}, ["at most 16"]),
        ({"stream": "yes"}, ["'stream' is 'yes'", "bool"]),
        ({"stream_options": {"x": 1}}, ["stream_options", "include_usage"]),
        ({"ignore_eos": 1}, ["ignore_eos is 1"]),
        ({"speculation": "no"}, ["'speculation' is 'no'"]),
        ({"prompt": [5] * CONTEXT}, [f"prompt has {CONTEXT} tokens", "shorten the prompt"]),
        ({"prompt": [5] * 390, "max_tokens": 11}, ["lower max_tokens to 10"]),
    ],
)
def test_a_wrong_field_is_one_line_that_says_what_and_what_to_do(server, fields, words):
    message = server.error(**{"prompt": "She had", **fields})
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["the prompt is empty"]),
        ({"messages": "hello"}, ["'messages' is 'hello'"]),
        ({"messages": ["hello"]}, ["a message is 'hello'"]),
        ({"messages": [{"role": "user"}]}, ["a message is", "role"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["type text"]),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, ["a message is"]),
        ({"messages": [], "prompt": "She"}, ["'prompt' is 'She'", "unknown"]),
        ({"tools": [{"type": "function"}]}, ["not supported"]),
        ({"response_format": {"type": "json_object"}}, ["not supported"]),
    ],
)
def test_a_wrong_chat_is_refused(server, monkeypatch, fields, words):
    monkeypatch.setattr(server.service.protocol._tokenizer, "encode_chat", list, raising=False)
    message = server.error(CHAT, **fields)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe{}", b"[" * 100_000, b"1" * 5000]
)
def test_a_body_that_is_no_object_is_refused(server, body):
    headers = {"content-type": "application/json"}
    response = server.http.post(TEXT, content=body, headers=headers)
    assert response.status_code == 400
    assert "send an object" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "\ud800"}),
        (TEXT, {"prompt": "She", "stop": "\ud800"}),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (CHAT, {"messages": [{"role": "\ud800", "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}),
    ],
)
def test_text_that_is_no_unicode_is_refused(server, monkeypatch, path, fields):
    monkeypatch.setattr(server.service.protocol._tokenizer, "encode_chat", list, raising=False)
    headers = {"content-type": "application/json"}
    response = server.http.post(path, content=json.dumps(fields).encode(), headers=headers)
    assert response.status_code == 400
    assert "not valid Unicode" in response.json()["error"]["message"]


def test_other_types_models_paths_and_methods_are_refused(server):
    plain = server.http.post(TEXT, content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    with pytest.raises(openai.NotFoundError, match=r"'gpt-9' is not served; use tiny") as caught:
        server.openai.completions.create(model="gpt-9", prompt="She had")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught_length:
        server.openai.completions.create(model="tiny", prompt=[5] * 401)
    assert caught_length.value.code == "context_length_exceeded"
    for response in (server.http.get(TEXT), server.http.get("/v2"), server.post("/health")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(server):
    with server.raw("Content-Length: 100000000") as connection:
        assert b" 413 " in connection.recv(20)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.raw("Transfer-Encoding: chunked", body=chunk * 17) as connection:
        assert b" 413 " in connection.recv(20)
    assert server.post(prompt="x" * 100_000_000).status_code == 413


def test_a_client_that_does_not_finish_its_body_is_cut_off(engine, monkeypatch):
    monkeypatch.setattr("minitri.serve.app.FAREWELL_SECONDS", 0.1)
    with serving(engine, body_seconds=0.2) as server:
        with server.raw("Content-Length: 100", body=b'{"prompt"') as connection:
            received = b""
            while part := connection.recv(4096):  # to the end of the connection
                received += part
        assert b" 408 " in received
        assert server.post(prompt="She had", max_tokens=1).status_code == 200
        with server.raw("Content-Length: 100", body=b'{"prompt"'):
            pass
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_a_key_is_asked_for_everywhere_but_at_health(engine):
    with serving(engine, api_key="clé") as server:
        for path in ("/v1/models", "/metrics"):
            assert server.http.get(path).status_code == 401
        assert server.post(prompt="She had").status_code == 401
        assert server.http.get("/health").status_code == 200
        headers = {"authorization": "Bearer clé".encode()}
        assert server.http.get("/v1/models", headers=headers).status_code == 200
        wrong = {"authorization": "Bearer clef"}
        assert server.http.get("/v1/models", headers=wrong).status_code == 401


def test_a_request_ends_at_the_time_limit_and_frees_its_row(engine):
    with serving(engine, seconds=0.1) as server:
        fields = {"prompt": "She had", "max_tokens": 390, "ignore_eos": True}
        message = server.error(status=504, **fields)
        assert "0.1 s" in message
        server.wait_until_free()
        stream = server.post(**fields, stream=True).text
        last = [line for line in stream.splitlines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_free()


def test_beyond_the_queue_requests_are_asked_to_come_later(engine):
    gate = threading.Event()
    with serving(engine, before=gate.wait, num_rows=1, max_queue=1) as server:
        with server.raw(prompt="She had"), server.raw(prompt="x"):
            server.wait(lambda: server.service.num_open == 2)
            response = server.post(prompt="She had")
            gate.set()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        server.wait_until_free()
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_a_run_that_fails_ends_its_requests_and_is_opened_again(engine, monkeypatch, caplog):
    monkeypatch.setattr("minitri.serve.worker.RETRY_SECONDS", 0.0)
    failures = [InputError("out of memory"), RuntimeError("broken")]

    def fail():
        if failures:
            raise failures.pop()

    with serving(engine, before=fail) as server:
        assert "RuntimeError('broken')" in server.error(prompt="She had", status=500)
        assert "out of memory" in server.error(prompt="She had", status=400)
        assert server.post(prompt="She had").status_code == 200
    assert "the run failed: broken" in caplog.text
