"""Whatever an answer says, and however its text is cut, the pieces are those of the whole text."""

import json
import random
import time

import pytest

from minitri.apps.serve.chats.answer_parser import FORMATS, AnswerParser, Piece

NAMES = ["get_weather", "get_time", "now"]
CALL = (
    '{"name": "get_weather", "arguments": {"city": "Köln \\u00e9 \\"}{[", "days": [1, {"a": 2}]}}'
)
ARGUMENTS = '{"city": "Köln \\u00e9 \\"}{[", "days": [1, {"a": 2}]}'
NOW = '{"name": "now", "arguments": {}}'
WEATHER, CLOCK = ("get_weather", ARGUMENTS), ("now", "{}")
TOOL = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA, LLAMA_NOW = (it.replace('"arguments"', '"parameters"') for it in (CALL, NOW))
WITH_ID = CALL[:-1] + ', "id": "VvvODy9mT"}'
SEEN = [  # format, text, thought, content, calls
    ("hermes", "", "", "", []),
    ("hermes", "  plain text\n", "", "  plain text\n", []),
    ("hermes", TOOL, "", "", [WEATHER]),
    ("hermes", f"\n\n{TOOL}\n", "", "", [WEATHER]),
    ("hermes", f"{TOOL}\n<tool_call>{NOW}</tool_call>", "", "", [WEATHER, CLOCK]),
    ("hermes", f"Yes.\n{TOOL} Or <tool_call>{NOW}", "", "Yes.\nOr ", [WEATHER, CLOCK]),
    ("hermes", f"<think>\n<tool_call>?\n</think>\n\n{TOOL}", "<tool_call>?\n", "", [WEATHER]),
    ("hermes", "<think>\n\n</think>\n\nYes <think>.", "", "Yes <think>.", []),
    ("hermes", "<think>it never ends </thi", "it never ends </thi", "", []),
    ("hermes", f"<tool_call>{CALL}", "", "", [WEATHER]),
    ("hermes", TOOL.replace("get_weather", "get_time"), "", "", [("get_time", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL[:-1]}", "", "", [WEATHER]),
    ("hermes", f"<tool_call>{CALL[:50]}", "", "", [("get_weather", CALL[37:50])]),
    ("hermes", f"<tool_call>{CALL}</tool_c", "", "</tool_c", [WEATHER]),
    ("hermes", "<tool_call>{'name'}</tool_call>", "", "<tool_call>{'name'}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "rm", "arg', "", '<tool_call>{"name": "rm", "arg', []),
    ("hermes", '<tool_call>{"name": "now", ', "", '<tool_call>{"name": "now", ', []),
    ("hermes", f"<tool_call> no {TOOL}", "", "<tool_call> no ", [WEATHER]),
    ("hermes", f"a <tool_ b <tool_call{TOOL}", "", "a <tool_ b <tool_call", [WEATHER]),
    ("hermes", f"{NOW} {{", "", f"{NOW} {{", []),
    ("hermes", '<tool_call>{"type": "function", "name": "now", "parameters": {}}', "", "", [CLOCK]),
    ("llama3", LLAMA, "", "", [WEATHER]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA_NOW}", "", "", [WEATHER, CLOCK]),
    ("llama3", f"\n{LLAMA_NOW};\n{LLAMA}", "", "", [CLOCK, WEATHER]),
    ("llama3", f"<think>so</think>\n{LLAMA}", "so", "", [WEATHER]),
    ("llama3", f"{LLAMA}; that is it", "", "; that is it", [WEATHER]),
    ("llama3", '{"answer": 42}', "", '{"answer": 42}', []),
    ("llama3", f"Use {LLAMA}", "", f"Use {LLAMA}", []),
    ("llama3", f"Look: <|python_tag|>{LLAMA}", "", "Look: ", [WEATHER]),
    ("llama3", "<|python_tag|>print(1)", "", "<|python_tag|>print(1)", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {NOW}]", "", "", [WEATHER, CLOCK]),
    ("mistral", f"[TOOL_CALLS] [{WITH_ID}, {NOW}]", "", "", [WEATHER, CLOCK]),
    ("mistral", f"Yes.[TOOL_CALLS] [{NOW}] Done", "", "Yes.Done", [CLOCK]),
    ("mistral", f"[TOOL_CALLS]{NOW}", "", f"[TOOL_CALLS]{NOW}", []),
    ("mistral", "[TOOL_CALLS] [3]", "", "[TOOL_CALLS] [3]", []),
]


def merged(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one kind that follow each other put together."""
    found: list[Piece] = []
    for kind, text in pieces:
        if found and found[-1].kind == kind != "call":
            text = found.pop().text + text
        found.append(Piece(kind, text))
    return found


def parsed(form: str | None, cuts: list[str], *, thinks: bool = False) -> list[Piece]:
    parser = AnswerParser(FORMATS[form] if form else None, NAMES, thinks=thinks)
    pieces = [piece for text in cuts for piece in parser.push(text)]
    assert all(text for _, text in pieces)
    return merged([*pieces, *parser.push("", is_last=True)])


@pytest.mark.parametrize(("form", "text", "thought", "content", "calls"), SEEN)
def test_an_answer_is_thought_content_and_calls(form, text, thought, content, calls):
    pieces = parsed(form, [text])
    for kind, wanted in (("reasoning_content", thought), ("content", content)):
        assert "".join(it.text for it in pieces if it.kind == kind) == wanted
    assert [it.text for it in pieces if it.kind == "call"] == [name for name, _ in calls]
    assert "".join(it.text for it in pieces if it.kind == "arguments") == "".join(
        given for _, given in calls
    )


def test_pieces_do_not_depend_on_where_a_text_is_cut():
    """10,000 random cuts, most of them into a few characters at a time."""
    draw = random.Random(0)
    for _ in range(10_000):
        form, text, *_ = draw.choice(SEEN)
        density = draw.choice((0.02, 0.2, 0.5, 1.0))
        cuts = [at for at in range(1, len(text)) if draw.random() < density]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(form, pieces) == parsed(form, [text]), (text, pieces)


def test_texts_put_together_at_random_lose_nothing():
    """Where there is no call and no thought, the content is the text."""
    draw = random.Random(1)
    parts = ["<tool_call>", "</tool_call>", "{", '"name"', ":", '"now"', ",", "[TOOL_CALLS]", "["]
    parts += ["<think>", " ", "\n", "<|python_tag|>", ";", "x", NOW, LLAMA_NOW, "<"]
    num_plain = 0
    for _ in range(5_000):
        form = draw.choice([*FORMATS])
        text = "".join(draw.choices(parts, k=draw.randrange(1, 9)))
        pieces = parsed(form, [*text])
        assert pieces == parsed(form, [text])
        if (
            not any(it.kind in ("call", "reasoning_content") for it in pieces)
            and "<think>" not in text
        ):
            assert "".join(it.text for it in pieces) == text
            num_plain += 1
    assert num_plain > 3_000


@pytest.mark.parametrize("form", [*FORMATS, None])
def test_only_what_may_begin_a_tag_waits(form):
    parser = AnswerParser(FORMATS[form] if form else None, NAMES)
    text = "It is <b>5</b> < 7 [see {1}] and [TOOLS] <|x|> \\ end"
    num_told = 0
    for at, character in enumerate(text, 1):
        num_told += sum(len(it.text) for it in parser.push(character))
        tag = FORMATS[form].opening if form else ""
        waiting = text[num_told:at]
        assert not waiting or tag.startswith(waiting)
    assert num_told == len(text)


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_go_on_as_they_come(form):
    head = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3": ""}[form] + NOW[:-3]
    parser = AnswerParser(FORMATS[form], NAMES)
    assert parser.push(head) == []
    assert parser.push("{") == [Piece("call", "now"), Piece("arguments", "{")]
    for piece in ('"a', "\\", '"}', '": "', "\U0001f642", '"', "}"):
        assert parser.push(piece) == [Piece("arguments", piece)]
    assert parser.push("}") == []


def test_a_thought_may_be_opened_by_the_prompt():
    for cuts in (["\nwell", "</th", "ink>", "\n\nYes"], ["\nwell</think>\n\nYes"]):
        found = parsed("hermes", cuts, thinks=True)
        assert found == [Piece("reasoning_content", "well"), Piece("content", "Yes")]
    assert parsed(None, [f"x</think>{TOOL}"], thinks=True)[1] == Piece("content", TOOL)


def test_a_long_answer_takes_as_long_as_its_characters():
    text = json.dumps({"text": 'x{\\"' * 50_000})
    pieces = parsed("hermes", [*f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>'])
    assert pieces == [Piece("call", "now"), Piece("arguments", text)]


@pytest.mark.parametrize("start", ["", '{"name" ', "<think>"])
def test_nor_do_spaces_that_may_stand_before_a_tag(start):
    """A stream's pieces are read where those of all others wait."""
    parser = AnswerParser(FORMATS["llama3"], NAMES)
    started = time.perf_counter()
    for text in [start, *[" "] * 20_000]:
        parser.push(text)
    parser.push("", is_last=True)
    assert time.perf_counter() - started < 5
