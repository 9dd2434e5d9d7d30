"""Whatever an answer says, and however its text is cut, the pieces are those of the whole text."""

import json
import random

import pytest

from minitri.apps.serve.chats.answer_parser import FORMATS, AnswerParser, Piece

ARGUMENTS = '{"city": "Köln \\u00e9 \\"}{[", "days": [1, {"name": "x", "arguments": {}}]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
NOW = '{"name": "now", "arguments": {}}'
WEATHER, CLOCK = Piece("call", ARGUMENTS, "get_weather"), Piece("call", "{}", "now")
TOOL = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA, LLAMA_NOW = (it.replace('"arguments": {', '"parameters": {', 1) for it in (CALL, NOW))
SEEN = [  # format, text, thought, content, calls
    ("hermes", f"Yes.\n{TOOL}\n<tool_call>{NOW}", "", "Yes.\n", [WEATHER, CLOCK]),
    ("hermes", f"<think>\n<tool_call>?\n</think>\n\n{TOOL}", "<tool_call>?\n", "", [WEATHER]),
    ("hermes", "<think>\n\n</think>\n\nYes <think>.", "", "Yes <think>.", []),
    ("hermes", "<think>it never ends </thi", "it never ends </thi", "", []),
    ("hermes", f"<tool_call>{CALL[:50]}", "", "", [Piece("call", CALL[37:50], "get_weather")]),
    ("hermes", '<tool_call>{"name": "rm", "arg', "", '<tool_call>{"name": "rm", "arg', []),
    ("hermes", f"a <tool_ b <tool_call{TOOL}", "", "a <tool_ b <tool_call", [WEATHER]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA_NOW}", "", "", [WEATHER, CLOCK]),
    ("llama3", f"<think>so</think>\n{LLAMA_NOW};\n{LLAMA}", "so", "", [CLOCK, WEATHER]),
    ("hermes", f"\n{TOOL}", "", "", [WEATHER]),
    ("llama3", f'{{"answer": 42}} {LLAMA}', "", f'{{"answer": 42}} {LLAMA}', []),
    ("llama3", f"Look: <|python_tag|>{LLAMA}", "", "Look: ", [WEATHER]),
    ("mistral", f"Yes.[TOOL_CALLS] [{CALL}, {NOW}]", "", "Yes.", [WEATHER, CLOCK]),
    ("mistral", "[TOOL_CALLS] [3]", "", "[TOOL_CALLS] [3]", []),
]


def parsed(form: str | None, cuts: list[str]) -> list[Piece]:
    """All pieces; texts of one kind that follow each other are put together."""
    parser = AnswerParser(FORMATS[form] if form else None)
    pieces = [piece for text in cuts for piece in parser.push(text)]
    merged: list[Piece] = []
    for kind, text, name in [*pieces, *parser.push("", is_last=True)]:
        assert text or name
        if merged and merged[-1].kind == kind != "call":
            text = merged.pop().text + text
        merged.append(Piece(kind, text, name))
    return merged


@pytest.mark.parametrize(("form", "text", "thought", "content", "calls"), SEEN)
def test_an_answer_is_thought_content_and_calls(form, text, thought, content, calls):
    texts = [Piece("reasoning_content", thought), Piece("content", content)]
    assert parsed(form, [text]) == [*(piece for piece in texts if piece.text), *calls]


def test_pieces_do_not_depend_on_where_a_text_is_cut():
    """Random cuts, most of them into a few characters at a time, of texts that make sense and of
    parts put together. Content is all of a text without calls and thoughts."""
    draw = random.Random(0)
    parts = ["<tool_call>", "</tool_call>", "{", '"name"', ":", '"now"', ",", "[TOOL_CALLS]", "["]
    parts += ["<think>", " ", "\n", "<|python_tag|>", ";", "x", NOW, LLAMA_NOW, "<"]
    for number in range(1_500):
        form, text, *_ = draw.choice(SEEN)
        if number % 2:
            text = "".join(draw.choices(parts, k=draw.randrange(1, 9)))
        density = draw.choice((0.02, 0.2, 0.5, 1.0))
        cuts = [at for at in range(1, len(text)) if draw.random() < density]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = parsed(form, [text])
        assert parsed(form, pieces) == whole, (text, pieces)
        if "<think>" not in text and not any(piece.kind == "call" for piece in whole):
            assert "".join(piece.text for piece in whole) == text


@pytest.mark.parametrize("form", [*FORMATS, None])
def test_only_what_may_begin_a_tag_waits(form):
    parser = AnswerParser(FORMATS[form] if form else None)
    text = "It is <b>5</b> < 7 [see {1}] and [TOOLS] <|x|> \\ end"
    tag = FORMATS[form].opening if form else ""
    num_passed = 0
    for place, character in enumerate(text, 1):
        num_passed += sum(len(piece.text) for piece in parser.push(character))
        assert tag.startswith(text[num_passed:place])
    assert num_passed == len(text)


def test_a_long_answer_takes_as_long_as_its_characters():
    """A parser that reads characters again and again would take hours here."""
    text = json.dumps({"text": 'x}\\"' * 10_000})
    pieces = parsed("hermes", [*f'<tool_call>{{"name": "now", "arguments": {text}}}'])
    assert pieces == [Piece("call", text, "now")]
    for start in ("", '{"name" ', "<think>"):
        assert len(parsed("llama3", [start, *[" "] * 30_000, "x"])) == 1
