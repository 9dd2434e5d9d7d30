"""What the model reads of a conversation with tools, and that it reads its own tokens again."""

import pytest

from minitri import End, InputError, Request
from minitri.apps.serve.bodies.chat_body import Conversation
from minitri.apps.serve.bodies.strict_json import checked
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.chats.replay import Replay
from minitri.core.requests import Row
from minitri.text.chat_template import ChatTemplate
from minitri.text.text_stream import TextReader
from tests.apps.serve.scripted import say
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
    """A model with one of the templates, and what its server keeps."""

    def __init__(self, engine, monkeypatch, source: str) -> None:
        template = ChatTemplate(source, {})
        monkeypatch.setitem(vars(engine.tokenizer), "chat_template", template)
        self.engine, self.kept = engine, Replay()
        self.encode = engine.tokenizer.encode_marked

    def prompt(self, *messages, tools=TOOLS, choice="auto", owner="", goes_on=False) -> ChatPrompt:
        fields = {"messages": messages, "tools": tools}
        fields |= {"tool_choice": choice, "continue_final_message": goes_on}
        asked = checked(Conversation, fields)
        return ChatPrompt(asked, self.engine, self.kept, owner)

    def answer(self, prompt: ChatPrompt, text: str, tokens: list[int] | None = None) -> list[int]:
        """Answers, and returns all tokens then."""
        request = Request(prompt.token_ids, shown=prompt.shown, max_new_tokens=400)
        end = self.say(request, text, tokens=tokens)
        prompt.keep(prompt.parser().push(end.text, is_last=True), end)
        return [*prompt.token_ids, *end.token_ids]

    def say(self, request: Request, text: str, **how) -> End:
        """The end of an output that says this text."""
        reader = TextReader(
            self.engine.tokenizer,
            request.prompt,
            stop=request.generation.stop,
            shown=request.shown,
        )
        row = Row(0, request, request.prompt, reader)
        return say(row, self.engine.tokenizer, text, **how)[-1]


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


@families
@pytest.mark.parametrize("as_letters", [False, True])
def test_the_next_prompt_begins_with_the_very_tokens_of_prompt_and_answer(
    model, family, as_letters
):
    """The client sends arguments back with other spaces, and without escapes."""
    tokens = None
    if as_letters:  # as no tokenizer would
        tokens = [token for letter in SAID[family] for token in model.encode(letter)]
    said = model.answer(model.prompt(USER), SAID[family], tokens)
    later = model.prompt(USER, ANSWER, RESULT)
    assert later.token_ids[: len(said)] == said
    plain = model.encode(later.text)
    assert plain[: len(said)] != said
    rest = later.token_ids[len(said) :]
    assert rest == plain[-len(rest) :]
    assert later.token_ids.count(2) == plain.count(2)
    said = model.answer(later, "It is warm.")
    warm, other = (
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "So?"},
    )
    last = model.prompt(USER, ANSWER, RESULT, warm, other)
    if family == "mistral":  # whose tools stand before the last question
        assert last.token_ids == model.encode(last.text)
    else:
        assert last.token_ids[: len(said)] == said


def test_an_answer_that_was_cut_goes_on_with_its_end(model):
    prompt = model.prompt(USER)
    request = Request(prompt.token_ids, max_new_tokens=5)
    end = model.say(request, "It is warm in Köln, and sunny.")
    assert end.finish_reason == "length"
    prompt.keep(prompt.parser().push(end.text, is_last=True), end)
    later = model.prompt(USER, {"role": "assistant", "content": end.text}, USER)
    said = [*prompt.token_ids, *end.token_ids]
    rest = model.encode(f"</s>\n<s>user\n{USER['content']}</s>\n<s>assistant\n")
    assert later.token_ids == said + rest


def test_an_answer_that_goes_on_is_kept_with_its_beginning(model):
    begun = {"role": "assistant", "content": "It is"}
    prompt = model.prompt(USER, begun, goes_on=True)
    assert prompt.token_ids == model.encode(prompt.text) + model.encode("It is")
    said = model.answer(prompt, " warm.")
    later = model.prompt(USER, {"role": "assistant", "content": "It is warm."}, USER)
    assert later.token_ids[: len(said)] == said


@pytest.mark.parametrize("model", [THINKING], indirect=True)
def test_a_thought_stays_in_the_prompt(model):
    said = model.answer(model.prompt(USER), f"I look\n</think>\n\n{SAID['hermes']}")
    later = model.prompt(USER, ANSWER, RESULT)
    assert later.token_ids[: len(said)] == said
    assert later.parser().push("so</think>Yes", is_last=True)[0].kind == "reasoning_content"


def test_what_is_kept_is_of_one_owner_one_conversation_and_these_tools(model):
    said = model.answer(model.prompt(USER, owner="a"), SAID["hermes"])

    def num_common(*messages, **how) -> bool:
        return model.prompt(*messages, **how).token_ids[: len(said)] == said

    turns = (USER, ANSWER, RESULT)
    assert num_common(*turns, owner="a")
    assert not num_common(*turns, owner="b")
    assert not num_common(*turns)
    assert not num_common(*turns, owner="a", tools=TOOLS[:1])
    assert not num_common({"role": "user", "content": "So?"}, *turns[1:], owner="a")
    other = ANSWER | {"content": "I look."}
    assert not num_common(USER, other, RESULT, owner="a")


def test_a_prompt_that_the_template_writes_in_another_way_is_read_anew(model, monkeypatch):
    """As with a date in it."""
    model.answer(model.prompt(USER), SAID["hermes"])
    other = ChatTemplate(QWEN.replace("<tools>", "<TOOLS>"), {})
    monkeypatch.setitem(vars(model.engine.tokenizer), "chat_template", other)
    later = model.prompt(USER, ANSWER, RESULT)
    assert later.token_ids == model.encode(later.text)


def test_calls_that_are_not_whole_and_texts_before_a_stop_are_not_kept(model):
    model.answer(model.prompt(USER), SAID["hermes"][:60])
    prompt = model.prompt(USER)
    end = model.say(Request([1], stop="warm"), "It is warm")
    prompt.keep(prompt.parser().push(end.text, is_last=True), end)
    assert not model.kept._kept


def test_what_was_not_used_for_long_goes(monkeypatch):
    kept = Replay(max_tokens=100)
    for number in range(20):
        kept.keep(bytes([number]), "prompt", [number] * 30)
        kept.find([bytes([0])])
        assert kept._num_tokens == sum(len(it.token_ids) for it in kept._kept.values()) <= 100
    assert [*kept._kept] == [bytes([18]), bytes([19]), bytes([0])]
    kept.keep(bytes([0]), "prompt", range(500))
    assert (kept._num_tokens, len(kept._kept)) == (0, 0)


def test_several_calls_of_one_answer_are_one_each_for_templates_that_want_that(engine, monkeypatch):
    model = Model(engine, monkeypatch, FAMILIES["llama3"])
    second = {"id": "y", "type": "function", "function": {"name": "now", "arguments": ""}}
    both = ANSWER | {"tool_calls": [*ANSWER["tool_calls"], second]}
    results = RESULT, {"role": "tool", "tool_call_id": "y", "content": "noon"}
    text = model.prompt(USER, both, *results).text
    assert text.count("assistant: {") == 2
    said = model.answer(model.prompt(USER), SAID["llama3"] + '; {"name": "now", "parameters": {}}')
    assert model.prompt(USER, both, *results).token_ids[: len(said)] == said


def test_a_template_that_ignores_tools_says_so(engine, monkeypatch):
    model = Model(engine, monkeypatch, "{% for it in messages %}{{ it.content }}{% endfor %}")
    for turns, tools in (([USER], TOOLS), ([USER, ANSWER, RESULT], [])):
        with pytest.raises(InputError, match="chat template leaves tools out"):
            model.prompt(*turns, tools=tools)
    assert model.prompt(USER, choice="none").text == USER["content"]
