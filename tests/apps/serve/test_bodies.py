"""Bodies of requests: what each is answered with, or one line that names what is wrong."""

import copy
import functools
import json
import math
import random
import re
from pathlib import Path

import pytest

from minitri import SamplingParams
from minitri.apps.serve.answers import in_stream
from tests.apps.serve.conftest import complete, own_text, serving
from tests.conftest import check_parts

TEXT, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
RECORDED = json.loads(Path(__file__).with_name("recorded_requests.json").read_text("utf-8"))
USER = {"role": "user", "content": "a"}
DEFAULTS = {TEXT: {"prompt": "a"}, RESPONSE: {"input": "a"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
IMAGE = {"type": "image_url"}
WRONG = CALL | {"function": {"name": "f", "arguments": "[1]"}}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "x", "output": "b"},
]
SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1}
SAMPLING |= {"frequency_penalty": 1, "repetition_penalty": 1.1, "logit_bias": {"5": -1}, "seed": 3}
SAMPLING |= {"bad_words": ["b"], "stop": ["b"], "stream_options": {"include_usage": True}}
FORM = {"type": "json_object"}
NOTHING = {"n": None, "stop": None, "suffix": "", "best_of": 1, "metadata": {"a": "b"}}
NOTHING |= {"response_format": {"type": "text"}}


def sent(path, *turns, **fields):
    """Path and body of a request; a chat has more turns."""
    defaults = {"messages": [USER, *turns]} if path == CHAT else DEFAULTS[path]
    return path, defaults | fields


text, chat, response = (functools.partial(sent, path) for path in (TEXT, CHAT, RESPONSE))


def answer(text, finish_reason="stop", **fields):
    return [{"index": 0, "finish_reason": finish_reason, "logprobs": None, "text": text} | fields]


YES = {"role": "assistant", "content": "Yes."}
ANSWERED = [  # path and body, parts of the answer to it where the model says "Yes."
    (text(), {"object": "text_completion", "model": "tiny", "choices": answer("Yes.")}),
    (text(**NOTHING), {"choices": answer("Yes.")}),
    (text(max_tokens=2), {"choices": answer("Yes", "length")}),
    (chat(), {"object": "chat.completion", "choices": [{"message": YES, "finish_reason": "stop"}]}),
    (chat({**YES, "name": None}, USER, max_tokens=9), {}),
    (chat(CALLED), {"object": "chat.completion"}),
    (chat({**YES, "refusal": None, "annotations": []}, USER), {"object": "chat.completion"}),
    (chat(tools=[TOOL], tool_choice=TOOL, parallel_tool_calls=False), {"model": "tiny"}),
    (text(**SAMPLING), {"choices": answer("Yes.")}),
    (text(structured_outputs={"json": '{"type": "object"}', "regex": None}), {}),
    (text(response_format={"type": "json_object", "schema": {"required": ["a"]}}), {}),
    (response(), {"object": "response", "status": "completed", "error": None}),
    (response(input=ITEMS, tools=[TOOL | TOOL["function"]]), {"status": "completed"}),
]
REFUSED = [  # path and body, the field that the error names, and a word of what it says
    (text(prompt=""), "prompt", "token"),
    (chat({"content": "a"}), "messages.1.role is missing", "give it"),
    (text(prompt=[1, 320]), "320", "0 to 319"),
    (text(prompt=[5] * 4090, max_tokens=7), "max_tokens", "4096"),
    (chat(temprature=1), "temprature is 1", "did you mean temperature?"),
    (chat({"role": "user"}), "role user without content", "give it a text"),
    (chat({"role": "user", "contnet": "a"}), "messages.1.contnet", "did you mean content?"),
    (chat(max_completion_tokens=9, max_tokens=1), "max_completion_tokens is 9", "as max_tokens;"),
    (text(too_short=1), "too_short is 1", "leave it out"),
    (text(seed=1 << 64), "seed is", "at most 18446744073709551615"),
    (text(stop=[1]), "stop.0 is 1", "it must be a text"),
    (text(stop=[*(f"{n:04d}" for n in range(256)), "y"]), "stop", "at most 1024 characters"),
    (text(structured_outputs={"regex": ["a"]}), 'response_format is {"regex": ["a"', "/docs"),
    (text(structured_outputs={"regex": "a", "json": {}}), 'is {"regex": "a"', "/docs"),
    (text(structured_outputs={"regex": "a"}, response_format=FORM), "structured", "as response_"),
    (text(response_format=FORM | {"schema": {}, "x": 1}), "response_format", "/docs"),
    (response(input=[USER | {"reasoning": "hm"}]), "reasoning is", "leave it out"),
    ((CHAT, {"messages": []}), "messages", "must not be empty"),
    (chat(USER | {"content": [IMAGE]}), "messages.1.content.0.type is", "'text'"),
    (chat(CALLED | {"tool_calls": [WRONG]}), "tool_calls.0.function.arguments", "object"),
    (chat(tools=[TOOL | {"function": {"name": '"'}}]), "tools.0.name", "letters"),
    (chat(tools=[TOOL["function"]]), 'tools is [{"name": "f"}]', "function"),
    (chat(tools=[TOOL], tool_choice="g"), "tool_choice is 'g'", "a function in tools"),
    (chat(tools=[TOOL], structured_outputs={"regex": "a"}), "response_format is no JSON", "tools"),
    (chat(tools=[TOOL], tool_choice="f", continue_final_message=True), "tool_choice", "none"),
    (response(input=[{"type": "item_reference", "id": "x"}]), "input", "messages and calls"),
    (response(text={"format": FORM, "verbosity": "low"}), "response_format", "/docs"),
    (response(text={"format": FORM}, structured_outputs=FORM), 'text is {"fo', "also given as"),
    (response(details=True), "details is true", "False"),
    (chat(enable_thinking=False), "enable_thinking is false", "leave it out"),
]


def is_part(wanted, of) -> bool:
    """Whether objects of JSON have all these fields, and perhaps others."""
    if isinstance(wanted, dict):
        return all(name in of and is_part(value, of[name]) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(wanted) == len(of) and all(map(is_part, wanted, of))
    return wanted == of


def test_sampling_is_as_the_client_says(scripted, run):
    scripted.post(TEXT, prompt="a", speculation=False, **SAMPLING)
    names = SAMPLING.keys() & SamplingParams.__dataclass_fields__.keys()
    fields = {name: SAMPLING[name] for name in names} | {"logit_bias": {5: -1}}
    [request] = run.requests[-1:]
    assert (request.sampling, request.speculation) == (SamplingParams(**fields), False)


@pytest.mark.parametrize(("sent", "wanted"), ANSWERED)
def test_a_body_has_its_answer(scripted, run, sent, wanted):
    path, body = sent
    run.texts.append("Yes.")
    answered = scripted.post(path, **body)
    assert answered.status_code == 200
    assert is_part(wanted, answered.json()), answered.text


@pytest.mark.parametrize(("sent", "named", "word"), REFUSED)
def test_a_wrong_body_is_one_line_that_names_the_field(scripted, sent, named, word):
    path, body = sent
    refused = scripted.post(path, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    check_parts(error["message"])
    assert all(part in error["message"] for part in (named, word))
    is_too_long = "shorten the prompt" in error["message"]
    assert error["code"] == ("context_length_exceeded" if is_too_long else "invalid_request")
    assert is_too_long or error["param"] == error["message"].split()[0]


@pytest.mark.parametrize("sent", RECORDED, ids=lambda sent: sent["client"])
def test_a_recorded_request_of_a_client_is_answered(scripted, run, sent):
    """Bodies as the clients in docs/clients.md send them."""
    run.texts.append(sent["says"])
    answered = scripted.post(sent["path"], **sent["body"])
    assert answered.status_code == 200, answered.text
    ends = re.findall(r'"finish_reason": "(\w+)"|"type": "response.(completed)"', answered.text)
    assert "".join(ends[-1]) == sent["finish"]


JSON = {"content-type": "Application/JSON; charset=utf-8"}
NO_OBJECTS = [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe{}", b"[" * 60_000, b"1" * 5000]


def test_what_is_no_object_of_json_is_refused(server):
    for body in NO_OBJECTS:
        refused = server.http.post(TEXT, content=body, headers=JSON)
        assert refused.status_code == 400
        assert ("an object" in refused.text, "DecodeError" in refused.text) == (True, False)
    typed = {"content-type": "application/x-www-form-urlencoded"}  # as curl sends it, and a page
    foreign = [typed | {name: "cross-site"} for name in ("origin", "sec-fetch-site")]
    for headers, code in ((typed, 200), ({}, 200), (foreign[0], 415), (foreign[1], 415)):
        done = server.http.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
        assert done.status_code == code, headers
    get, other, post = server.http.get(TEXT), server.http.get("/v2"), server.post("/health")
    assert [it.status_code for it in (get, other, post)] == [405, 404, 405]
    assert (get.headers["allow"], {*post.headers["allow"].split(", ")}) == ("POST", {"GET", "HEAD"})
    assert all(it.json()["error"]["code"] == "invalid_request" for it in (get, other, post))
    assert all(path in other.text for path in (TEXT, CHAT, RESPONSE, "/docs"))


VALUES = [None, True, -1, 0, 1 << 70, 0.5, math.nan, "", "\ud800", "x" * 99, "auto", [], [[]]]
VALUES += [{}, {"": 1}, [1, "a"], [{"type": "text"}], {"type": "function"}]


def places(value):
    """All objects and lists inside, each with a key of it."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_no_body_makes_the_server_fail(scripted, caplog):
    """One field at any depth has another value, or bytes are cut or changed."""
    draw = random.Random(0)
    for _ in range(80):
        path, body = copy.deepcopy(draw.choice(ANSWERED)[0])
        place, key = draw.choice([*places(body)])
        place[key] = draw.choice(VALUES)
        content = json.dumps(body).encode()
        if draw.random() < 0.2:
            content = content[: draw.randrange(len(content))] + draw.choice([b"", b"\xff", b"}"])
        answered = scripted.http.post(path, content=content, headers=JSON)
        assert answered.status_code in (200, 400, 404), content
        if answered.status_code != 200:
            check_parts(answered.json()["error"]["message"])
    assert not [record for record in caplog.records if record.exc_info]


def test_unknown_fields_are_ignored_if_that_is_wanted(engine):
    """Unsupported values of known fields are refused."""
    with serving(engine, lenient=True) as server:
        extra = {"length_penalty": 1.1, "stream_options": {"x": 1}, "new\nline": 1}
        assert complete(server, extra_body=extra).choices[0].text == own_text(engine)
        assert server.post(prompt="a", n=9).status_code == 400


def test_an_event_is_one_line_for_all_clients():
    content = {"text": "a\u2028b\u2029c\x85d\ud800日"}
    line, _ = in_stream(content).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == content
    assert "日" in line


def test_the_endpoints_are_listed_with_examples_and_the_schemas_of_their_bodies(scripted, run):
    described = scripted.http.get("/docs.json").json()
    examples = described.pop("examples")
    schemas = {path: described[path] for path in examples}
    assert {*schemas} == {TEXT, CHAT, RESPONSE}
    assert all(description["description"] for description in described.values())
    for path, body in [(key, body) for key in examples for body in examples[key]]:
        assert scripted.post(path, **body).status_code == 200
    for (path, body), _ in ANSWERED:
        assert {*body} <= {*schemas[path]["properties"], *NOTHING, "structured_outputs"}
    for schema in schemas.values():
        assert all("description" in field for field in schema["properties"].values())
