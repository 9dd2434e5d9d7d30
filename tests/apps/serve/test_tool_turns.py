"""Calls of a real, tiny model: held to their tools' schemas."""

import json

import jsonschema
import pytest

from minitri.apps.serve.chats import chat_prompt
from tests.apps.serve.conftest import serving

CONTEXT = 16_384
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit", "größer"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
NESTED = {"type": "object", "properties": {"at": PARAMETERS}, "required": ["at"]}
NESTED |= {"additionalProperties": False}
SCHEMAS = {"get_weather": PARAMETERS, "plan": NESTED}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
USER = {"role": "user", "content": "What is the weather like?"}


@pytest.fixture(scope="module")
def server(roomy):
    with serving(roomy, context=CONTEXT) as running:
        yield running


@pytest.fixture
def ask(server, family):
    def ask(messages, **fields):
        fields = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 400} | fields
        return server.openai.chat.completions.create(**fields)

    return ask


def test_what_must_be_called_is_called_with_arguments_of_its_schema(ask):
    for seed in range(12):
        [choice] = ask([USER], tool_choice="required", seed=seed, temperature=0.8).choices
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            schema = SCHEMAS[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), schema)
    by_name = {"type": "function", "function": {"name": "plan"}}
    for names, fields in (
        ({"plan"}, {"tool_choice": by_name}),
        ({*SCHEMAS}, {"parallel_tool_calls": False, "tool_choice": "required"}),
    ):
        for seed in range(4):
            [call] = ask([USER], seed=seed, **fields).choices[0].message.tool_calls
            assert call.function.name in names


def test_text_without_calls_is_what_it_would_be(ask, roomy, monkeypatch):
    """A grammar that waits for a tag takes nothing of the distribution but control tokens, unused
    ones, and a byte that no text has, which are out of it here anyhow."""
    tokenizer = roomy.tokenizer
    [byte] = (it for it in range(tokenizer.num_tokens) if tokenizer.token(it) == "\u00ff")
    unused = range(tokenizer.num_tokens, roomy.config.vocab_size)
    bias = dict.fromkeys(map(str, (0, 1, byte, *unused)), -100)
    fields = {"max_tokens": 40, "logit_bias": bias}
    texts = []
    for function in (chat_prompt.calls_grammar, lambda *_, **__: ""):
        monkeypatch.setattr(chat_prompt, "calls_grammar", function)
        choices = [ask([USER], seed=seed, **fields).choices[0] for seed in range(8)]
        texts.append([it.message.content for it in choices])
    assert texts[0] == texts[1]
