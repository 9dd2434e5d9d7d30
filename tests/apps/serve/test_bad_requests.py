"""Whatever a client sends, it gets one clear error, and the server goes on."""

import json
import threading

import openai
import pytest

from minitri.apps.serve.api_error import as_api_error
from minitri.apps.serve.protocol import MAX_WARNINGS
from minitri.core.errors import FaultError, InputError, shorten
from tests.apps.serve.conftest import CONTEXT, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt is ['a', [5], 6]; give a text", {"prompt": ["a", [5], 6]}),
        ("prompt", {"prompt": ["a", ""]}),
        ("prompt", {"prompt": ["a"] * 2049}),
        ("prompt", {"prompt": [1, True]}),
        ("prompt", {"prompt": [1, 320]}),
        ("prompt", {"prompt": [5] * CONTEXT}),
        ("prompt", {"prompt": "\ud800"}),
        ("n is 9; it must be less than or equal to 8", {"n": 9}),
        ("n", {"messages": [USER], "n": 0}),
        ("echo is 1", {"echo": 1}),
        ("echo", {"echo": True, "logprobs": 1, "stream": True}),
        ("echo", {"messages": [USER], "echo": True}),
        ("suffix", {"suffix": "the end"}),
        ("max_tokens", {"max_tokens": 0}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("structured_outputs", {"structured_outputs": {"gbnf": "root"}}),
        ("json_schema cannot be used", {"structured_outputs": {"json": {"type": "strin"}}}),
        ("the regex cannot be used", {"structured_outputs": {"regex": "(a"}}),
        ("line 1, column 8", {"structured_outputs": {"grammar": "start: foo"}}),
        ("grammar", {"grammar": "root ::= x"}),
        ("logit_bias is for token 320", {"logit_bias": {"320": 1}}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("presence_penalty is 2.1", {"presence_penalty": 2.1}),
        ("min_tokens", {"min_tokens": -1}),
        ("bad_words", {"bad_words": [""]}),
        ("max_tokns", {"max_tokns": 3}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("length_penalty", {"length_penalty": 1.1}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"x": 1}}),
        ("max_tokens is '3'; it must be a whole number", {"max_tokens": "3"}),
        ("lower max_tokens", {"prompt": [5] * 390, "max_tokens": 11}),
        ("max_completion_tokens", {"messages": [USER], "max_completion_tokens": 0}),
        ("stop is [1]; it must be strings", {"stop": [1]}),
        ("temperature is -1; it must be greater than or equal to 0", {"temperature": -1}),
        ("seed", {"seed": 1 << 64}),
        ("seed", {"seed": -(1 << 63) - 1}),
        ("logprobs", {"logprobs": 21}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"x": 1}}),
        ("speculation", {"speculation": ""}),
        ("speculation", {"speculation": {}}),
        ("seed", {"seed": [1]}),
        ("seed", {"seed": True}),
        ("messages", {"messages": []}),
        ("message", {"messages": "hello"}),
        ("message", {"messages": [{"role": "user"}]}),
        ("message", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("message", {"messages": [{**USER, "tool_calls": [1]}]}),
        ("prompt", {"messages": [USER], "prompt": "She"}),
        ("Unicode", {"messages": [{**USER, "content": "\ud800"}]}),
        ("logprobs", {"messages": [USER], "logprobs": 2}),
        ("top_logprobs", {"messages": [USER], "top_logprobs": 2}),
    ],
)
def test_a_wrong_field_is_one_line_that_names_it(server, template, monkeypatch, setting, fields):
    is_chat = "messages" in fields
    body = json.dumps(fields if is_chat else {"prompt": "She had", **fields}).encode()
    headers = {"content-type": "application/json; charset=utf-8"}
    response = server.http.post(CHAT if is_chat else TEXT, content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, "\n" in error["message"]) == (400, False)
    assert setting in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe{}", b"[" * 60_000, b"1" * 5000]
)
def test_a_body_that_is_no_object_is_refused(server, body):
    headers = {"content-type": "application/json"}
    response = server.http.post(TEXT, content=body, headers=headers)
    assert response.status_code == 400
    assert "send an object" in response.json()["error"]["message"]


def test_other_models_paths_and_methods_are_refused(server):
    with pytest.raises(openai.NotFoundError, match="'gpt-9'"):
        server.openai.completions.create(model="gpt-9", prompt="She had")
    get, other, post = server.http.get(TEXT), server.http.get("/v2"), server.post("/health")
    assert [it.status_code for it in (get, other, post)] == [405, 404, 405]
    assert (get.headers["allow"], {*post.headers["allow"].split(", ")}) == ("POST", {"GET", "HEAD"})


def test_unknown_fields_are_ignored_if_that_is_wanted_with_one_warning_each(engine, caplog):
    """Not unsupported values of fields that it knows; and a client cannot fill the log."""
    with serving(engine, ignored=set()) as server:
        fields = {"model": "tiny", "prompt": "She had", "max_tokens": 2, "seed": 3}
        plain = server.openai.completions.create(**fields)
        extra = {"length_penalty": 1.1, "chat_template_kwargs": {"x": 1}, "new\nline": 1}
        for _ in range(2):
            answer = server.openai.completions.create(**fields, extra_body=extra)
            assert answer.choices[0].text == plain.choices[0].text
        with pytest.raises(openai.BadRequestError, match="n is 9; it must be less"):
            server.openai.completions.create(**fields, n=9)
        for name in (*extra, "n"):
            assert caplog.text.count(f"the field {name!r} is ignored") == (name in extra)
        server.post(prompt="She had", max_tokens=1, **{f"x{i}": 1 for i in range(300)})
        assert caplog.text.count("is ignored") == MAX_WARNINGS


def test_ways_out_of_the_command_line_and_the_library_are_left_out():
    error = FaultError("no memory", "shorten the prompt", "lower max_new_tokens=", "use a=False")
    assert str(as_api_error(error)) == "no memory; shorten the prompt"


def test_a_body_that_is_too_long_or_does_not_end_is_refused_or_forgotten(server, monkeypatch):
    with server.raw(b" " * 2_000_000, missing=10**8) as connection:
        assert b" 413 " in connection.recv(20)
    for size in (70_000, 100_000_000):  # no prompt that fits is so long
        assert server.post(prompt="x" * size).status_code == 413
    with server.raw(b'{"prompt"', missing=9):
        pass
    monkeypatch.setattr("minitri.apps.serve.app.BODY_SECONDS", 0.2)
    with server.raw(b'{"prompt"', missing=9) as connection:
        received = b""
        while part := connection.recv(4096):  # to the end of the connection
            received += part
    assert b" 408 " in received
    assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_beyond_the_queue_requests_are_asked_to_come_later(engine):
    gate = threading.Event()
    with serving(engine, before=gate.wait, num_rows=1, max_queue=1) as server:
        with server.raw(prompt="She had"), server.raw(prompt="x"):
            server.wait(lambda: server.service.num_open == 2)
            response = server.post(prompt="She had")
            gate.set()
        assert response.status_code == 503
        server.wait_until_free()
        assert server.post(prompt="She had", max_tokens=1).status_code == 200


def test_a_run_that_fails_ends_its_requests_and_is_opened_again(engine, caplog):
    failures = [InputError("out of memory"), RuntimeError("broken")]

    def fail():
        if failures:
            raise failures.pop()

    with serving(engine, before=fail) as server:
        responses = [server.post(prompt="She had") for _ in range(3)]
    assert [response.status_code for response in responses] == [500, 400, 200]
    assert "RuntimeError('broken')" in responses[0].text
    assert "out of memory" in responses[1].text
    assert "the run failed: broken" in caplog.text


def test_of_a_long_value_an_error_reads_the_beginning():
    class Text(str):
        def __str__(self):
            return self

        def split(self):
            raise AssertionError("all of it was read")

    assert shorten(Text("ab " * 100_000), 20) == "ab ab ab ab ab ab..."
