"""Tools at /v1/chat/completions, by the `openai` client; the model says what the test tells it."""

import json

import openai
import pytest

from minitri.text.chat_template import ChatTemplate
from tests.apps.serve.conftest import serving
from tests.apps.serve.scripted import ScriptedRun
from tests.apps.serve.templates import FAMILIES
from tests.apps.serve.test_chat_prompt import ANSWER, CALL, RESULT, SAID, TOOLS, USER

CHAT = "/v1/chat/completions"
NOW = {"hermes": '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'}
NOW |= {"llama3": '; {"name": "now", "parameters": {}}', "mistral": ""}
ARGUMENTS = '{"city":  "K\\u00f6ln"}'


@pytest.fixture(scope="module")
def run(roomy):
    return ScriptedRun(roomy)


@pytest.fixture(scope="module")
def scripted(roomy, run):
    with serving(roomy, run=run, context=4096) as server:
        yield server


@pytest.fixture
def hermes(roomy, monkeypatch):
    template = ChatTemplate(FAMILIES["hermes"], {})
    monkeypatch.setitem(vars(roomy.tokenizer), "chat_template", template)


@pytest.fixture
def ask(scripted, run):
    def ask(text, *messages, **fields):
        run.texts.append(text)
        fields = {"model": "tiny", "messages": [USER, *messages], "tools": TOOLS} | fields
        return scripted.openai.chat.completions.create(**fields)

    return ask


def test_calls_are_told_whole_and_in_pieces(ask, family):
    text = "" if family == "llama3" else "I look.\n"
    text += SAID[family] + NOW[family]
    names = ["get_weather", "now"] if NOW[family] else ["get_weather"]
    [choice] = ask(text).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if family == "llama3" else "I look.\n")
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == names
    assert calls[0].function.arguments == ARGUMENTS
    assert [call.type for call in calls] == ["function"] * len(names)
    assert len({call.id for call in calls}) == len(names)
    chunks = [*ask(text, stream=True)]
    heads = [it for c in chunks for it in c.choices[0].delta.tool_calls or () if it.id]
    assert [(it.index, it.function.name) for it in heads] == [*enumerate(names)]
    pieces = [it for c in chunks for it in c.choices[0].delta.tool_calls or () if it.index == 0]
    assert "".join(it.function.arguments for it in pieces) == ARGUMENTS
    assert len([it for it in pieces if it.function.arguments]) > 5
    said = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert said == (choice.message.content or "")
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]
    with_helper = scripted_stream(ask, text)
    assert [call.function.arguments for call in with_helper] == [
        call.function.arguments for call in calls
    ]


def scripted_stream(ask, text):
    """Calls that the client's own helper puts together."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state = ChatCompletionStreamState()
    for chunk in ask(text, stream=True):
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0].message.tool_calls


def test_a_whole_exchange_goes_on_with_the_same_tokens(ask, run, family):
    message = ask(SAID[family]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
    first = run.prompts[-1]
    answer = ask("It is warm.", message, result).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is warm.", "stop")
    assert run.prompts[-1][: len(first)] == first
    again = ask("It is warm.", message.model_dump(), result).choices[0]
    assert again.message.content == "It is warm."
    assert run.prompts[-1] == run.prompts[-2]


def test_thinking_is_told_apart(ask, hermes):
    text = "<think>\nShall I?\n</think>\n\nYes."
    message = ask(text, tools=[]).choices[0].message
    assert (message.reasoning_content, message.content) == ("Shall I?\n", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in ask(text, tools=[], stream=True)]
    assert "".join(getattr(it, "reasoning_content", "") for it in deltas) == "Shall I?\n"
    assert "".join(it.content or "" for it in deltas) == "Yes."
    both = ask(f"<think>so</think>{SAID['hermes']}").choices[0]
    assert (both.message.reasoning_content, both.message.content) == ("so", None)
    assert both.finish_reason == "tool_calls"


def test_without_tools_or_with_choice_none_nothing_is_a_call(ask, hermes):
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = ask(SAID["hermes"], **fields).choices[0]
        assert (choice.message.content, choice.finish_reason) == (SAID["hermes"], "stop")
        assert choice.message.tool_calls is None


def test_a_call_that_is_cut_ends_by_length(ask, hermes):
    choice = ask(SAID["hermes"], max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert ARGUMENTS.startswith(call.function.arguments)


def with_tool(**changes):
    return {"tools": [{"type": "function", "function": TOOLS[0]["function"] | changes}]}


def with_turn(**changes):
    return {"messages": [USER, ANSWER | changes, RESULT]}


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("tools is 3; it must be a list", {"tools": 3}),
        ("tools[0]", {"tools": [{"type": "function", "function": {}}]}),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
        ("tools[0]", with_tool(name="")),
        ("tools[0]", with_tool(name="a b")),
        ("tools[0]", with_tool(name="required")),
        ("tools[0]", with_tool(parameters=[1])),
        ("tools has two functions of one name", {"tools": TOOLS[:1] * 2}),
        ("tool_choice is 'always'", {"tool_choice": "always"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "rm"}}}),
        ("tool_choice is 'required'", {"tool_choice": "required", "tools": []}),
        ("parallel_tool_calls is 1; it must be true or false", {"parallel_tool_calls": 1}),
        ("messages[1].tool_call_id is 'call_x81mQ', which no", {"messages": [USER, RESULT]}),
        (
            "messages[2].tool_call_id is ''",
            {"messages": [USER, ANSWER, {**RESULT, "tool_call_id": None}]},
        ),
        ("messages[0].tool_call_id is ['x']", {"messages": [{**RESULT, "tool_call_id": ["x"]}]}),
        ("messages[0].tool_calls[0] is 1", {"messages": [USER | {"tool_calls": [1]}]}),
        ("messages[1].tool_calls[0] is 1", with_turn(tool_calls=[1])),
        (
            "messages[1].tool_calls[0].function.arguments",
            with_turn(tool_calls=[{"id": "call_x81mQ", "function": CALL | {"arguments": "[1]"}}]),
        ),
        ("response_format is given with tools", {"response_format": {"type": "json_object"}}),
        ("messages[1].function_call is", with_turn(function_call={"name": "x"})),
        ("messages[0] is", {"messages": [{"role": "user"}]}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(scripted, hermes, named, fields):
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 1} | fields
    response = scripted.http.post(CHAT, json=body)
    message = response.json()["error"]["message"]
    assert (response.status_code, "\n" in message) == (400, False)
    assert named in message


def test_without_llguidance_what_must_be_constrained_is_refused(ask, hermes, monkeypatch):
    monkeypatch.setattr("minitri.apps.serve.chats.chat_prompt.find_spec", lambda _: None)
    assert ask(SAID["hermes"]).choices[0].finish_reason == "tool_calls"
    by_name = {"type": "function", "function": {"name": "now"}}
    for name, value in (
        ("tool_choice", "required"),
        ("tool_choice", by_name),
        ("parallel_tool_calls", False),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{name} needs .* minitri.grammar"):
            ask("", **{name: value})


def test_control_tokens_that_are_tags_are_read(tmp_path, monkeypatch):
    """Mistral's are in its vocabulary, and leave no text of their own."""
    from minitri.text.text_stream import IncrementalDecoder
    from minitri.text.tokenizer import Tokenizer, TokenizersBackend
    from tests.conftest import byte_level_tokenizer

    pipeline = byte_level_tokenizer()
    pipeline.add_special_tokens(["[TOOL_CALLS]", "<other>"])
    tokenizer = Tokenizer(TokenizersBackend(pipeline), None)
    controls = tokenizer.control_ids(["[TOOL_CALLS]", "]", "", "<think>"])
    assert [*controls] == ["[TOOL_CALLS]"]
    text = "Yes é[TOOL_CALLS][<other>1, 2]"
    ids = tokenizer.encode_marked(text)
    assert tokenizer.decode(ids) == "Yes é[1, 2]"
    assert tokenizer.decode(ids, shown={*controls.values()}) == "Yes é[TOOL_CALLS][1, 2]"
    decoder = IncrementalDecoder(tokenizer, [], {*controls.values()})
    pieces = [decoder.push(token) for token in ids] + [decoder.flush()]
    assert "".join(pieces) == "Yes é[TOOL_CALLS][1, 2]"
    assert "[TOOL_CALLS]" in pieces


def test_a_result_may_be_of_parts_and_a_call_without_a_type(ask, hermes, run):
    answer = ANSWER | {"tool_calls": [{"id": "call_x81mQ", "function": CALL}]}
    parts = [{"type": "text", "text": it} for it in ("21 ", "degrees")]
    ask("Yes.", answer, RESULT | {"content": parts}, json.loads(json.dumps(USER)))
    assert "21 degrees" in scripted_text(run)


def scripted_text(run: ScriptedRun) -> str:
    return run._engine.tokenizer.decode(run.prompts[-1])
