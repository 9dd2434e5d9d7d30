"""The grammar of calls that a request gets, as the library that is to hold it reads it."""

import re

import pytest

from minitri.apps.serve.chats.chat_body import checked
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.protocol import ChatBody
from tests.apps.serve.templates import FAMILIES, QWEN
from tests.conftest import refused

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
LOOK_AROUND = {"type": "string", "pattern": "(?=x)y"}
A = '{"name": "f", "arguments": {"city": "x"}}'
B = '{"name": "g", "arguments": {"city":  "}{"}}'
P, Q = (it.replace("arguments", "parameters") for it in (A, B))
TOOL = f"<tool_call>\n{A}\n</tool_call>"
OTHER = f"<tool_call>{B}</tool_call>"
LIST = f"[TOOL_CALLS] [{A}, {B}]"
BY_NAME = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
REQUIRED = {"tool_choice": "required"}
FORM = {"response_format": {"type": "json_object"}}
SINGLE = {"parallel_tool_calls": False}
FREE, OPEN = "{# <think> #}", "{{- '<think>\\n' }}"  # ends of templates: thoughts may be, are begun
TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<think>", "</think>")
T, E = "\x01", "\x02"  # stand for tokens 257 and 258
CASES = [  # format, end of its template, control tokens, fields of the request,
    # whole answers, answers that may still go on, what is not allowed
    ("hermes", "", (), {}, ["", f"x {TOOL}\n{OTHER}", '{"a"', A], [TOOL[:30]], [f"{TOOL}x"]),
    ("hermes", "", (), {}, [], [], [TOOL.replace('"f"', '"h"'), TOOL.replace("city", "town")]),
    ("hermes", "", (), FORM, ['{"a": 1}', TOOL], ['{"a'], ["x", f"x{TOOL}", '{"a": 1}x']),
    ("hermes", "", (), FORM | REQUIRED, [TOOL], [], ['{"a": 1}']),
    ("hermes", "", (), REQUIRED, [TOOL, f"\n{TOOL}{OTHER}"], [""], ["x", f"x{TOOL}"]),
    ("hermes", "", (), BY_NAME, [OTHER], ["<tool"], [TOOL, f"{OTHER}{OTHER}", "x"]),
    ("hermes", FREE, (), {}, ["x", f"x{TOOL}", f"\n<think><tool_call>?</think>Yes {TOOL}"], [], []),
    ("hermes", FREE, (), {}, ["<think><tool_call>x"], [], ["<think>x</think><tool_call>x"]),
    ("hermes", OPEN, (), {}, ["<tool_call>x", f"x</think>{TOOL}"], [], ["x</think><tool_call>x"]),
    ("hermes", OPEN, (), BY_NAME, [f"x</think>\n{OTHER}"], ["x"], ["x</think>y"]),
    ("hermes", "", TAGS, {}, ["x", f"x{T}{A}{E}\n{T}{B}{E}", TOOL], [T + A], [f"{T}x", E]),
    ("hermes", FREE, THOUGHTS, {}, ["x", f"{T}x", f"{T}<tool_call>x{E}{TOOL}"], [], [T + E + T]),
    ("llama3", "", (), {}, ["x", f"\n{P}; {Q}", f"x<|python_tag|>{P}"], [P[:12]], [f"{P}x"]),
    ("llama3", "", (), {}, ['{"a": 1}'], [], ['{"type": "function"', P.replace('"f"', '"h"')]),
    ("llama3", "", (), REQUIRED, [P, f"{P};{Q}"], [], ["x", '{"a"']),
    ("mistral", "", (), {}, [LIST, f"x{LIST}"], ["[TOOL_CALLS]["], ["[TOOL_CALLS]x", f"{LIST}x"]),
    ("mistral", "", (), SINGLE, [f"[TOOL_CALLS][{A}]"], [], [LIST]),
]


class Bytes:
    """A token for each byte, an end token, and two control tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([it]) for it in range(256)] + [b"</s>", b"<a>", b"<b>"]
    special_token_ids = (256, 257, 258)

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


LEXICON = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), slices=[])


def allowed(grammar: str, text: str | bytes) -> tuple[bool, bool]:
    """Whether all of a text is allowed, and may end."""
    matcher = llguidance.LLMatcher(LEXICON, llguidance.LLMatcher.grammar_from_lark(grammar))
    text = text if isinstance(text, bytes) else text.encode()
    ids = [{1: 257, 2: 258}.get(byte, byte) for byte in text]
    count = matcher.try_consume_tokens(ids)
    return count == len(ids), matcher.is_accepting()


@pytest.fixture
def grammar_of(scripted, run, roomy, use_template, monkeypatch):
    """The grammar of a request with these functions, or what it is refused with."""

    def grammar_of(source, controls=(), functions=None, **fields) -> str:
        use_template(source)
        ids = dict(zip(controls, (257, 258), strict=False))
        monkeypatch.setattr(roomy.tokenizer, "control_ids", lambda tags: ids)
        functions = functions or [{"name": name, "parameters": CITY} for name in "fg"]
        fields["tools"] = [{"type": "function", "function": it} for it in functions]
        messages = [{"role": "user", "content": "a"}]
        answer = scripted.post("/v1/chat/completions", messages=messages, **fields)
        if answer.status_code != 200:
            return answer.json()["error"]["message"]
        return run.requests[-1].sampling.grammar.text

    return grammar_of


@pytest.mark.parametrize(("name", "end", "controls", "fields", "whole", "begun", "wrong"), CASES)
def test_calls_follow_the_grammar_and_other_text_is_free(
    grammar_of, name, end, controls, fields, whole, begun, wrong
):
    grammar = grammar_of(FAMILIES[name] + end, controls, **fields)
    for texts, wanted in ((whole, (True, True)), (begun, (True, False))):
        for text in texts:
            assert allowed(grammar, text) == wanted, text
    assert not any(allowed(grammar, text)[0] for text in wrong)
    if not fields and end != OPEN:  # bytes that are no text are free: half a character
        for byte in (0, 9, 0x7F, 0x80, 0xC3, 0xFE):
            assert allowed(grammar, bytes([byte])) == (True, True)


def test_schemas_are_held_where_they_can_be(grammar_of):
    odd = {"name": "f", "parameters": CITY | {"properties": {"city": LOOK_AROUND}}}
    assert allowed(grammar_of(QWEN, functions=[odd]), TOOL) == (True, True)
    refused = grammar_of(QWEN, functions=[odd | {"strict": True}])
    assert re.fullmatch("tools has f, .*leave strict out", refused)
    grammar = grammar_of(QWEN, functions=[{"name": "a.b-c_D9"}, {"name": "f"}])
    assert allowed(grammar, TOOL.replace('"f"', '"a.b-c_D9"')) == (True, True)
    wide = TOOL.replace('{"city"', "{" + " " * 400 + '"city"')
    assert allowed(grammar, wide)[0] is False


def test_of_tools_that_are_too_large_together_the_largest_is_named(roomy, use_template):
    use_template(QWEN)
    sizes = {"f": 1000, "g": 1300, "h": 1001}
    tools = [
        {"type": "function", "name": name, "parameters": {"properties": dict.fromkeys(keys, True)}}
        for name, keys in ((name, map(str, range(size))) for name, size in sizes.items())
    ]
    asked = checked(ChatBody, {"messages": [{"role": "user", "content": "a"}], "tools": tools})
    with refused("tools are too much, above all g", "at most"):
        ChatPrompt(asked, roomy).grammar(None)
