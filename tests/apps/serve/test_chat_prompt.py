"""What the model reads of a conversation with tools."""

import pytest

from minitri import InputError
from minitri.apps.serve.bodies.chat_body import Conversation, checked
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.text.chat_template import ChatTemplate
from tests.apps.serve.templates import FAMILIES, QWEN, THINKING

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Of a city", "parameters": PARAMETERS}
TOOLS = [
    {"type": "function", "function": FUNCTION | {"strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "Is it warm in Köln?"}
CALL = {"name": "get_weather", "arguments": '{"city":"Köln"}'}
ANSWER = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_x81mQ", "type": "function", "function": CALL}],
}
RESULT = {"role": "tool", "tool_call_id": "call_x81mQ", "content": "21 degrees"}
SAID = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "K\\u00f6ln"}}'
    "\n</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city":  "K\\u00f6ln"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city":  "K\\u00f6ln"}}]',
}


class Model:
    """A model with one of the templates."""

    def __init__(self, engine, monkeypatch, source: str) -> None:
        template = ChatTemplate(source, {})
        monkeypatch.setitem(vars(engine.tokenizer), "chat_template", template)
        self.engine = engine
        self.encode = engine.tokenizer.encode_marked

    def prompt(self, *messages, tools=TOOLS, choice="auto", goes_on=False) -> ChatPrompt:
        fields = {"messages": messages, "tools": tools}
        fields |= {"tool_choice": choice, "continue_final_message": goes_on}
        return ChatPrompt(checked(Conversation, fields), self.engine)


@pytest.fixture
def model(engine, monkeypatch, request):
    return Model(engine, monkeypatch, getattr(request, "param", QWEN))


families = pytest.mark.parametrize(
    ("model", "family"), [(source, name) for name, source in FAMILIES.items()], indirect=["model"]
)


@families
def test_the_template_sees_tools_calls_and_results(model, family):
    text = model.prompt(USER, ANSWER, RESULT).text
    wanted = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}'
        "\n</tool_call></s>\n<s>user\n<tool_response>\n21 degrees\n</tool_response></s>\n"
        "<s>assistant\n",
        "llama3": 'assistant: {"name": "get_weather", "parameters": {"city": "Köln"}}</s>'
        'ipython: "21 degrees"</s>assistant: ',
        "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln"}, "id": '
        '"aa61edb64"}]</s>[TOOL_RESULTS] {"content": 21 degrees, "call_id": "aa61edb64"}'
        "[/TOOL_RESULTS]",
    }
    assert text.endswith(wanted[family])
    assert "strict" not in text
    assert all(it in text for it in ("Of a city", '"now"', '"city"'))
    assert "now" not in model.prompt(USER, choice="none").text


def test_an_answer_that_goes_on_follows_its_beginning(model):
    begun = {"role": "assistant", "content": "It is"}
    prompt = model.prompt(USER, begun, goes_on=True)
    assert prompt.token_ids == model.encode(prompt.text) + model.encode("It is")


@pytest.mark.parametrize("model", [THINKING], indirect=True)
def test_a_thought_may_be_opened_by_the_template(model):
    parser = model.prompt(USER, ANSWER, RESULT).parser()
    assert parser.push("so</think>Yes", is_last=True)[0].kind == "reasoning_content"


def test_several_calls_of_one_answer_are_one_each_for_templates_that_want_that(engine, monkeypatch):
    model = Model(engine, monkeypatch, FAMILIES["llama3"])
    second = {"id": "y", "type": "function", "function": {"name": "now", "arguments": ""}}
    both = ANSWER | {"tool_calls": [*ANSWER["tool_calls"], second]}
    results = RESULT, {"role": "tool", "tool_call_id": "y", "content": "noon"}
    text = model.prompt(USER, both, *results).text
    assert text.count("assistant: {") == 2


def test_a_template_that_ignores_tools_says_so(engine, monkeypatch):
    model = Model(engine, monkeypatch, "{% for it in messages %}{{ it.content }}{% endfor %}")
    for turns, tools in (([USER], TOOLS), ([USER, ANSWER, RESULT], [])):
        with pytest.raises(InputError, match="chat template leaves tools out"):
            model.prompt(*turns, tools=tools)
    assert model.prompt(USER, choice="none").text == USER["content"]
