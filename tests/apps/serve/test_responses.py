"""/v1/responses by the real `openai` client, whose types check what it gets."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minitri import Request
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.chat_body import Conversation, checked
from minitri.apps.serve.bodies.completion import ResponseBody
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.protocol import Call
from minitri.apps.serve.responses import ResponseWriter
from minitri.text.chat_template import ChatTemplate
from tests.apps.serve.templates import FAMILIES
from tests.apps.serve.test_answers import MESSAGES, own_text

EVENT = TypeAdapter(ResponseStreamEvent)
ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {"role": "user", "content": "Who is?"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Anne", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}", "id": "fc_2"},
    {"type": "function_call_output", "call_id": "c1", "output": "a ship"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "no"}],
    },
]
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


def writer_of_a_stream(engine) -> ResponseWriter:
    return ResponseWriter(Call([Request([5], 3)], ResponseBody(stream=True), None), "tiny", engine)


@pytest.fixture
def ask(server, template):
    def ask(**fields):
        given = {"model": "tiny", "input": "Who is?", "max_output_tokens": 16}
        return server.openai.responses.create(**{**given, "extra_body": {"seed": 5}, **fields})

    return ask


def test_an_answer_is_that_of_the_chat(ask, server, engine, template):
    messages = [MESSAGES[0], {"role": "user", "content": "Who is?"}]
    prompt = engine.tokenizer.encode_marked(template.render(messages))
    text = own_text(engine, prompt, seed=5, num=16)
    answer = ask(instructions="Be brief.", store=False)
    Response.model_validate(answer.to_dict())
    assert answer.output_text == text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 16)
    again = ask(instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens > 0
    chat = server.openai.chat.completions.create(
        model="tiny", messages=messages, seed=5, max_tokens=16
    )
    assert chat.choices[0].message.content == text


def test_a_stream_has_all_events_in_order(ask):
    """Each with its number; the last has the whole answer."""
    whole = ask()
    events = [*ask(stream=True)]
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict())
        assert event.sequence_number == number
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert len(deltas) > 4
    last = events[-1].response
    assert "".join(deltas) == whole.output_text == last.output_text == events[-4].text
    assert last.usage.output_tokens == 16
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}


def test_the_clients_helper_for_streams_collects_the_answer(ask, server):
    fields = {"model": "tiny", "input": "Who is?", "max_output_tokens": 16}
    with server.openai.responses.stream(**fields, extra_body={"seed": 5}) as stream:
        kinds = {event.type for event in stream}
    assert {"response.output_text.delta", "response.output_text.done"} <= kinds


def test_an_answer_that_ends_by_itself_is_complete(ask):
    answers = (ask(extra_body={"seed": seed}, max_output_tokens=300) for seed in range(100))
    ended = next(it for it in answers if it.status == "completed")
    assert ended.incomplete_details is None
    assert ended.output[0].status == "completed"


def test_items_become_a_conversation():
    """Calls that follow one another are of one message, reasoning and unknown tools go."""
    fields = {"input": ITEMS, "instructions": "Hm", "tools": [LOOK, {"type": "web_search"}]}
    choice = {"type": "function", "name": "look"}
    asked = checked(ResponseBody, fields | {"tool_choice": choice}).conversation
    calls = [
        {"id": "c1", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "c2", "function": {"name": "look", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "Hm"},
        {"role": "developer", "content": [{"type": "input_text", "text": "Be"}]},
        {"role": "user", "content": "Who is?"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Anne"}],
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a ship"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "input_text", "text": "no"}]},
    ]
    tools = [{"type": "function", "function": LOOK}]
    wanted = {"messages": messages, "tools": tools, "tool_choice": "look"}
    assert asked.tool_choice == wanted.pop("tool_choice")
    wanted = checked(Conversation, wanted)
    assert (asked.messages, asked.tools) == (wanted.messages, wanted.tools)


def test_calls_and_reasoning_of_a_chat_become_items(engine):
    """However the arguments are cut."""
    writer = writer_of_a_stream(engine)
    said = [
        ("reasoning_content", "Hm"),
        ("content", "I "),
        ("content", "look."),
        ("call", "look"),
        ("arguments", '{"at"'),
        ("arguments", ": 1}"),
        ("call", "look"),
        ("arguments", "{}"),
    ]
    told = b"".join([*writer._add(said), *writer._close("completed")])
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: ")]
    for event in events:
        EVENT.validate_python(event)
    items = writer._response()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    assert [item["arguments"] for item in items[2:]] == ['{"at": 1}', "{}"]
    assert items[1]["content"][0]["text"] == "I look."
    assert [event["output_index"] for event in events] == sorted(e["output_index"] for e in events)
    done = [event for event in events if event["type"].endswith("arguments.done")]
    assert [event["arguments"] for event in done] == ['{"at": 1}', "{}"]
    assert all(item["status"] == "completed" for item in items)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("n", {"n": 2}),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [3]}),
        ("input", {"input": 3}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("text", {"text": {"verbosity": "low"}}),
        ("text", {"text": "x"}),
        ("tools", {"tools": [3]}),
        ("tools", {"tools": 3}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("truncation", {"truncation": "auto"}),
        ("background", {"background": True}),
        ("reasoning", {"reasoning": {"effort": "high"}}),
        ("details", {"details": True}),
        ("messages", {"messages": MESSAGES}),
        ("stream_options", {"stream_options": {"include_obfuscation": True}}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, template, name, fields):
    response = server.post("/v1/responses", **{"input": "Who is?", **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert name in error["message"]


def test_a_prompt_that_is_too_long_is_refused(ask):
    with pytest.raises(openai.BadRequestError, match="shorten") as refused:
        ask(input="She had " * 3000)
    assert refused.value.code == "context_length_exceeded"


def test_a_stream_that_fails_says_so(engine):
    writer = writer_of_a_stream(engine)
    told = writer.fail(ApiError(503, "unavailable", "no memory"))
    event = json.loads(told.partition(b"data: ")[2])
    assert EVENT.validate_python(event).response.error.message == "no memory"


def test_a_call_of_a_function_and_what_it_gave_make_a_turn(server, monkeypatch):
    """Whole and in a stream; the answer after it begins with the tokens of the call."""
    tokenizer = server.service.protocol.engine.tokenizer
    monkeypatch.setitem(vars(tokenizer), "chat_template", ChatTemplate(FAMILIES["hermes"], {}))
    shape = {"type": "object", "properties": {"at": {"enum": ["sea", "land"]}}, "required": ["at"]}
    tool = LOOK | {"parameters": shape | {"additionalProperties": False}}
    fields = {"model": "tiny", "tools": [tool], "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "max_output_tokens": 90}
    ask = server.openai.responses.create
    answers = (ask(input="Where?", extra_body={"seed": seed}, **fields) for seed in range(50))
    seed, answer = next(it for it in enumerate(answers) if it[1].status == "completed")
    fields["extra_body"] = {"seed": seed}
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "look")
    assert json.loads(call.arguments)["at"] in ("sea", "land")
    events = [*ask(input="Where?", stream=True, **fields)]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[-1] == "completed"
    deltas = [event.delta for event in events if "arguments.delta" in event.type]
    assert "".join(deltas) == call.arguments == events[-1].response.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a ship"}
    items = [{"role": "user", "content": "Where?"}, call.to_dict(), result]
    chat = checked(ResponseBody, {"input": items}).conversation
    assert "a ship" in ChatPrompt(chat, server.service.protocol.engine).text
