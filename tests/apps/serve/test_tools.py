"""Tools at /v1/chat/completions: the model says what the test gives."""

import re

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.apps.serve.templates import FAMILIES, THINKING

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [{"name": "get_weather", "parameters": PARAMETERS, "strict": True}, {"name": "now"}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
USER = {"role": "user", "content": "Is it warm in Köln?"}
CALL = {"name": "get_weather", "arguments": '{"city":"Köln"}'}
ANSWER = {"role": "assistant", "tool_calls": [{"id": "call_x81mQ", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "call_x81mQ", "content": "21 degrees"}
ARGUMENTS = '{"city":  "K\\u00f6ln"}'
WEATHER = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
NOW = '{"name": "now", "arguments": {}}'
SAID = {  # a call of one function, and the rest of a call of another one
    "hermes": (f"<tool_call>\n{WEATHER}\n</tool_call>", f"\n<tool_call>{NOW}</tool_call>"),
    "llama3": tuple(it.replace("arguments", "parameters") for it in (WEATHER, f"; {NOW}")),
    "mistral": (f"[TOOL_CALLS][{WEATHER}]", ""),
}


@pytest.fixture
def ask(scripted, run):
    """An answer of Hermes' format, unless the test chooses another template."""

    def ask(said, *messages, **fields):
        run.texts.append(said)
        fields = {"model": "tiny", "messages": messages or [USER], "tools": TOOLS} | fields
        return scripted.openai.chat.completions.create(**fields)

    return ask


@pytest.fixture(params=FAMILIES)
def family(ask, use_template, request):
    """The name of one of the formats of calls, whose chat template the model has."""
    use_template(FAMILIES[request.param])
    return request.param


def test_calls_are_those_of_the_text_whole_and_as_a_stream(ask, family):
    look = "" if family == "llama3" else "I look.\n"
    wanted = [("get_weather", ARGUMENTS), ("now", "{}")][: 1 + bool(SAID[family][1])]
    state = ChatCompletionStreamState()  # the client's own helper
    for chunk in ask(look + "".join(SAID[family]), stream=True):
        state.handle_chunk(chunk)
    whole = ask(look + "".join(SAID[family]))
    for choice in (whole.choices[0], state.get_final_completion().choices[0]):
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", look)
        calls = choice.message.tool_calls
        assert [(it.function.name, it.function.arguments) for it in calls] == wanted
        assert len({call.id for call in calls}) == len(wanted)


def test_the_template_sees_tools_calls_and_results(ask, run, family):
    """A choice of none shows the template no tools, and nothing is a call."""
    parts = [{"type": "text", "text": text} for text in ("21 ", "degrees")]
    ask("", USER, ANSWER, RESULT | {"content": parts})
    text = run.written(run.prompt)
    written = r'([0-9a-f]{9})\D*"get_weather", "\w+": {"city": "Köln"}}.*\1(?:21 degrees)</s>'
    assert re.search(written, text, re.DOTALL)
    assert [it in text for it in ('"now"', '"city"', "strict")] == [True, True, False]
    [choice] = ask(SAID[family][0], tool_choice="none").choices
    assert "now" not in run.written(run.prompt)
    assert (choice.message.content, choice.finish_reason) == (SAID[family][0], "stop")


def test_thoughts_are_told_apart_and_stay_in_the_prompt(ask, run, use_template):
    text = "<think>\nShall I?\n</think>\n\nYes."
    deltas = [chunk.choices[0].delta for chunk in ask(text, tools=[], stream=True)]
    assert "".join(getattr(it, "reasoning_content", "") for it in deltas) == "Shall I?\n"
    assert "".join(it.content or "" for it in deltas) == "Yes."
    use_template(THINKING)  # whose prompts open the thought
    choice = ask(f"so\n</think>\n\n{SAID['hermes'][0]}").choices[0]
    assert (choice.message.reasoning_content, choice.finish_reason) == ("so\n", "tool_calls")
    assert run.written(run.prompt).endswith("<think>\n")


def test_a_call_that_is_cut_ends_by_length(ask):
    [choice] = ask(SAID["hermes"][0], max_tokens=60).choices
    assert choice.finish_reason == "length"
    assert ARGUMENTS.startswith(choice.message.tool_calls[0].function.arguments)


def test_several_calls_are_one_each_for_templates_that_want_that(ask, run, use_template):
    use_template(FAMILIES["llama3"])
    second = {"id": "y", "function": {"name": "now", "arguments": ""}}
    both = ANSWER | {"tool_calls": [*ANSWER["tool_calls"], second]}
    turns = (USER, both, RESULT, {"role": "tool", "tool_call_id": "y", "content": "noon"})
    ask("", *turns)
    assert len(re.findall(r'<s>assistant\n\w{9}{"name"', run.written(run.prompt))) == 2


def test_a_template_that_ignores_tools_says_so(ask, use_template):
    use_template("{% for it in messages %}{{ it.content }}{% endfor %}")
    for turns, tools in (([USER], TOOLS), ([USER, ANSWER, RESULT], [])):
        with pytest.raises(openai.BadRequestError, match="chat template leaves tools out"):
            ask("", *turns, tools=tools)
    ask("", tool_choice="none")
