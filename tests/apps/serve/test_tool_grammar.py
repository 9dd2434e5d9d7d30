"""The grammar of calls, as the library that is to hold it reads it."""

import json

import pytest

from minitri import InputError
from minitri.apps.serve.bodies.chat_body import Conversation, checked
from minitri.apps.serve.chats.answer_parser import FORMATS
from minitri.apps.serve.chats.chat_prompt import calls_grammar, format_of
from tests.apps.serve.templates import FAMILIES

llguidance = pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
A = '{"name": "f", "arguments": {"city": "x"}}'
B = '{"name": "g", "arguments": {"city":  "}{"}}'
P, Q = (it.replace("arguments", "parameters") for it in (A, B))
TOOL = f"<tool_call>\n{A}\n</tool_call>"
OTHER = f"<tool_call>{B}</tool_call>"
LIST = f"[TOOL_CALLS] [{A}, {B}]"
BY_NAME = {"type": "function", "function": {"name": "g"}}
TAGS = {"<tool_call>": 257, "</tool_call>": 258}
THOUGHTS = {"<think>": 257, "</think>": 258}
T, E = "\x01", "\x02"  # stand for tokens 257 and 258
CASES = [  # format, how, whole answers, answers that may still go on, what is not allowed
    ("hermes", {}, ["", "hi <tool_", f"x {TOOL}\n{OTHER}", '{"a"', A], [TOOL[:30]], [f"{TOOL}x"]),
    ("hermes", {}, [], [], [TOOL.replace('"f"', '"h"'), TOOL.replace("city", "town")]),
    ("hermes", {"parallel": False}, ["x", f"x{TOOL}"], [], [f"{TOOL}{OTHER}"]),
    ("hermes", {"choice": "required"}, [TOOL, f"\n{TOOL}{OTHER}"], [""], ["x", f"x{TOOL}"]),
    ("hermes", {"choice": BY_NAME}, [OTHER], ["<tool"], [TOOL, f"{OTHER}{OTHER}", "x"]),
    (
        "hermes",
        {"may_think": True},
        ["x", f"x{TOOL}", "<think>a <tool_call>x", f"\n<think><tool_call>?</think>\nYes {TOOL}"],
        [f"<think>x</think>{TOOL[:20]}"],
        ["<think>x</think><tool_call>x"],
    ),
    (
        "hermes",
        {"may_think": True, "choice": "required"},
        [TOOL, f"<think>a <tool_call></think>\n\n{TOOL}"],
        ["<think>x"],
        ["<think>x</think>y", "y"],
    ),
    (
        "hermes",
        {"thinks": True},
        ["<tool_call>x", f"x</think>y{TOOL}"],
        [],
        ["x</think><tool_call>x"],
    ),
    ("hermes", {"thinks": True, "choice": BY_NAME}, [f"x</think>\n{OTHER}"], ["x"], ["x</think>y"]),
    ("hermes", {"controls": TAGS}, ["x", f"x{T}{A}{E}\n{T}{B}{E}", TOOL], [T + A], [f"{T}x", E]),
    ("hermes", {"controls": TAGS, "choice": "required"}, [T + A + E], [], ["x", TOOL]),
    (
        "hermes",
        {"controls": THOUGHTS, "may_think": True},
        ["x", f"{T}x{E}y", f"{T}<tool_call>x{E}{TOOL}", f"{T}x"],
        [],
        [f"{T}x{E}<tool_call>x"],
    ),
    ("hermes", {"controls": THOUGHTS, "thinks": True}, ["x", f"x{E}y{TOOL}"], [], [T]),
    ("llama3", {}, ["x", P, f"\n{P}; {Q}", '{"a": 1}', f"x<|python_tag|>{P}"], [P[:12]], [f"{P}x"]),
    ("llama3", {}, [], [], ['{"type": "function"', P.replace('"f"', '"h"')]),
    ("llama3", {"choice": "required"}, [P, f"{P};{Q}"], [], ["x", '{"a"']),
    ("llama3", {"may_think": True}, [f"<think>x</think>\n{P}", "<think>x</think>y"], [], []),
    ("mistral", {}, ["x", LIST, f"x{LIST}"], ["[TOOL_CALLS]["], ["[TOOL_CALLS]x", f"{LIST}x"]),
    ("mistral", {"parallel": False}, [f"[TOOL_CALLS][{A}]"], [], [LIST]),
]


class Bytes:
    """A token for each byte, an end token, and two control tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([it]) for it in range(256)] + [b"</s>", b"<a>", b"<b>"]
    special_token_ids = (256, 257, 258)

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


def read_tools(functions, **fields) -> Conversation:
    listed = [{"type": "function", "function": it} for it in functions]
    return checked(Conversation, {"tools": listed} | fields)


def tools(choice="auto", parallel=True, **changes):
    functions = ({"name": name, "parameters": CITY} | changes for name in ("f", "g"))
    return read_tools(functions, tool_choice=choice, parallel_tool_calls=parallel)


def allowed(grammar: str, text: str | bytes) -> tuple[bool, bool]:
    """Whether all of a text is allowed, and may end."""
    lexicon = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), slices=[])
    matcher = llguidance.LLMatcher(lexicon, llguidance.LLMatcher.grammar_from_lark(grammar))
    text = text if isinstance(text, bytes) else text.encode()
    ids = [{1: 257, 2: 258}.get(byte, byte) for byte in text]
    count = matcher.try_consume_tokens(ids)
    return count == len(ids), matcher.is_accepting()


@pytest.mark.parametrize(("name", "how", "whole", "begun", "wrong"), CASES)
def test_calls_follow_the_grammar_and_other_text_is_free(name, how, whole, begun, wrong):
    settings = {"controls": {}, "thinks": False, "may_think": False, "choice": "auto"} | how
    asked = tools(settings.pop("choice"), settings.pop("parallel", True))
    grammar = calls_grammar(asked, FORMATS[name], settings.pop("controls"), **settings)
    for text in whole:
        assert allowed(grammar, text) == (True, True), text
    for text in begun:
        assert allowed(grammar, text) == (True, False), text
    for text in wrong:
        assert allowed(grammar, text)[0] is False, text


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_that_are_no_text_are_free_too(name):
    """A model may write half a character."""
    grammar = calls_grammar(tools(), FORMATS[name], {}, thinks=False, may_think=False)
    for byte in {*range(255)} - {1, 2}:
        assert allowed(grammar, bytes([byte])) == (True, True)


def test_schemas_are_held_where_they_can_be():
    form = FORMATS["hermes"]
    odd = CITY | {"properties": {"city": {"type": "string", "pattern": "(?=x)y"}}}
    grammar = calls_grammar(tools(parameters=odd), form, {}, thinks=False, may_think=False)
    assert allowed(grammar, TOOL) == (True, True)
    with pytest.raises(InputError, match=r"tools has f, .* look-around.* leave strict out") as it:
        calls_grammar(tools(parameters=odd, strict=True), form, {}, thinks=False, may_think=False)
    assert "\n" not in str(it.value)
    grammar = calls_grammar(tools(parameters=None), form, {}, thinks=False, may_think=False)
    assert allowed(grammar, TOOL) == (True, True)
    wide = TOOL.replace('{"city"', "{" + " " * 400 + '"city"')
    assert allowed(grammar, wide)[0] is False


def test_formats_are_known_by_their_templates():
    for name, source in FAMILIES.items():
        assert format_of(source) == FORMATS[name]
    assert format_of("{{ tools | tojson }}") == FORMATS["hermes"]


def test_names_and_schemas_are_quoted():
    name = "a.b-c_D9"
    made = read_tools([{"name": name}])
    grammar = calls_grammar(made, FORMATS["hermes"], {}, thinks=False, may_think=False)
    call = json.dumps({"name": name, "arguments": {"x": '"'}})
    assert allowed(grammar, f"<tool_call>{call}</tool_call>") == (True, True)
