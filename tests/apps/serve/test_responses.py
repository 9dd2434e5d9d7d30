"""/v1/responses by the real `openai` client, whose types check what it gets."""

import itertools
import re

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.apps.serve.conftest import own_text

EVENT = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
ITEM_TEXT = {"type": "input_text", "text": "no"}
CALLED = [{"name": "look", "arguments": '{"at": 1}'}, {"name": "look", "arguments": "{}"}]
CALLS = [{"id": "c1", "function": CALLED[0]}, {"id": "c2", "function": CALLED[1]}]
ITEMS = [
    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {"role": "user", "content": "Who is?"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Anne", "annotations": []}]},
    {"type": "function_call", "call_id": "c1"} | CALLED[0],
    {"type": "function_call", "call_id": "c2", "id": "fc_2", "status": "completed"} | CALLED[1],
    {"type": "function_call_output", "call_id": "c1", "output": "a ship"},
    {"type": "function_call_output", "call_id": "c2", "output": [ITEM_TEXT]},
]
MESSAGES = [
    {"role": "system", "content": "Be"},
    {"role": "user", "content": "Who is?"},
    {"role": "assistant", "content": "Anne", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "a ship"},
    {"role": "tool", "tool_call_id": "c2", "content": "no"},
]


@pytest.fixture
def ask(server, render):
    def ask(**fields):
        given = {"model": "tiny", "input": "Who is?", "instructions": "Be brief."}
        given |= {"max_output_tokens": 16, "extra_body": {"seed": 5}}
        return server.openai.responses.create(**given | fields)

    return ask


def checked(events) -> list:
    """The events of a stream, each valid and with its number."""
    events = [*events]
    for number, event in enumerate(events):
        EVENT.validate_python(event.to_dict())
        assert event.sequence_number == number
    return events


def test_an_answer_is_that_of_the_chat_and_a_stream_has_all_events_in_order(ask, engine, render):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is?"}]
    prompt = engine.tokenizer.encode_marked(render(messages))
    answer = ask(store=False)
    Response.model_validate(answer.to_dict())
    assert answer.output_text == own_text(engine, prompt, seed=5, num=16)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), 16)
    events = checked(ask(stream=True))
    kinds = " ".join(event.type.removeprefix("response.") for event in events)
    assert re.sub("(output_text.delta ){4,}", "", kinds) == (
        "created in_progress output_item.added content_part.added "
        "output_text.done content_part.done output_item.done incomplete"
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(deltas) == answer.output_text == last.output_text == events[-4].text
    assert last.usage.output_tokens == 16
    assert last.usage.input_tokens_details.cached_tokens > 0
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}


def test_a_stream_that_fails_says_so(server, render):
    """An error after the first text is the last event."""
    fields = {"input": "Who?", "stream": True, "max_output_tokens": 300, "ignore_eos": True}
    steps = iter([None] * 9)  # and StopIteration
    with server.hooked(step=lambda: next(steps)):
        lines = server.post("/v1/responses", **fields).text.splitlines()
    event = EVENT.validate_json(lines[-2].removeprefix("data: "))
    assert event.type == "response.failed"
    assert "StopIteration" in event.response.error.message
    assert any("output_text.delta" in line for line in lines)


def test_items_become_the_conversation_of_a_chat(scripted, run):
    """Calls that follow one another are of one message; reasoning and other tools are left out."""
    choice = {"tools": [LOOK, {"type": "web_search"}], "tool_choice": {**LOOK, "strict": None}}
    scripted.openai.responses.create(model="tiny", input=ITEMS, **choice)
    items = run.prompt
    fields = {"messages": MESSAGES, "tools": [{"type": "function", "function": LOOK}]}
    assert scripted.post("/v1/chat/completions", **fields).status_code == 200
    assert items == run.prompt


def test_thoughts_texts_and_calls_become_items(scripted, run):
    calls = '<tool_call>{"name": "look", "arguments": %s}</tool_call>' * 2 % ('{"at": 1}', "{}")
    said = f"<think>Hm</think>I look.\n{calls}"
    run.texts += [said, said]
    ask = scripted.openai.responses.create
    events = checked(ask(model="tiny", input="Where?", tools=[LOOK], stream=True))
    assert events[-1].type == "response.completed"
    answer = ask(model="tiny", input="Where?", tools=[LOOK])
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert [place for place, _ in itertools.groupby(places)] == [*range(4)]
    done = [event.arguments for event in events if event.type.endswith("arguments.done")]
    assert done == ['{"at": 1}', "{}"]
    assert done == [it.delta for it in events if it.type.endswith("arguments.delta")]
    for items in (answer.output, events[-1].response.output):
        assert [item.type for item in items] == ["reasoning", "message", *["function_call"] * 2]
        assert [item.arguments for item in items[2:]] == done
        assert (items[0].content[0].text, items[1].content[0].text) == ("Hm", "I look.\n")
        assert all(item.status == "completed" for item in items)
