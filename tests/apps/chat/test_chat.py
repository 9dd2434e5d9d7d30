"""The chat as a user has it, piped or at a terminal; and the conversation that it keeps."""

import contextlib
import io
import json
import logging
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

import minitri
from minitri import InputError
from minitri.apps.chat import at_terminal
from minitri.apps.chat.chatting import COMMANDS, Chat, main
from minitri.apps.chat.conversation import Conversation, Turn, title_of
from minitri.apps.cli.arguments import OneLineParser
from minitri.core import memory
from minitri.core.log import log
from minitri.files.archive import NOWHERE, Archive, state_folder
from minitri.files.named_models import MODELS
from minitri.text.special_tokens import SpecialTokens
from minitri.text.tokenizer import Tokenizer
from tests.conftest import byte_level_tokenizer, write_hf_folder
from tests.core.rigs import tiny_config
from tests.files.test_chat_template import CHATML, LLAMA3

ENDLESS = "--logit-bias 2:-100"  # never the end-of-sequence token
NIGHT = ("night.txt", "It was a dark night. " * 60)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """A tiny model with a chat template and a long context."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    write_hf_folder(folder, max_position_embeddings=2048, vocab_size=330)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    (folder / "generation_config.json").unlink()  # so no sampling is recommended
    return folder


@pytest.fixture(scope="module")
def loaded(instruct):
    return minitri.load(str(instruct), dtype="float32", device="cpu")


@pytest.fixture
def num_cached(loaded, monkeypatch):
    """The number of cached tokens of each run's prompt."""
    runs = []
    real = loaded.generate
    monkeypatch.setattr(loaded, "generate", lambda *a, **b: runs.append(real(*a, **b)) or runs[-1])
    return lambda: [run.rows[0].stats.num_cached_tokens for run in runs]


@pytest.fixture
def begin(loaded, monkeypatch, capsys):
    """Starts a chat with --quiet."""
    monkeypatch.setattr(log, "handlers", [logging.lastResort])
    loaded.release()
    capsys.readouterr()

    def begin(flags=f"-n 12 {ENDLESS}", documents=(), folder=NOWHERE, **fields) -> Chat:
        args = OneLineParser("chat").parse_args(f"--seed 1 --prefill-chunk 64 {flags}".split())
        talk = Conversation(loaded.tokenizer, **fields)
        talk = talk.with_documents(dict(documents), loaded.config, args)
        return Chat(loaded, talk, args, Archive(folder))

    return begin


def test_piped_questions_are_answered_and_commands_obeyed(instruct, call, tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("It was a dark night. " * 20)
    (tmp_path / "lines").write_text("Who?\n\nAnd why?\n/nonsense\n/help\n/reset\nexit\nnever")
    words = f"--model {instruct} --dtype float32 --device cpu -n 12 -v {ENDLESS}".split()
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, err = call(main, *words, "--document", tmp_path / "a.txt", tmp_path / "b.txt")
    assert (code, "never" in out) == (0, False)
    assert max(map(len, re.findall(r"^/\w+ .*", err, re.MULTILINE))) < 80  # of /help
    messages = ["cut after 12 tokens", "temperature 0.7, top_p 0.9, ", "no /nonsense"]
    assert all(message in err for message in [*messages, *map("/{} ".format, COMMANDS)])
    read = [int(count) for count in re.findall(r"for (\d+) tokens of the prompt", err)]
    assert read[0] > 100 > max(read[1:])  # the documents are read once


COMMAND_LINES = Path(__file__).with_name("command_lines.txt").read_text("utf-8")


@pytest.mark.parametrize("line", COMMAND_LINES.strip().splitlines())
def test_a_command_is_answered_in_one_line(begin, capsys, line):
    chat = begin()
    typed, wanted = line.split(" | ")
    chat.obey(typed)
    [answer] = capsys.readouterr().err.splitlines()
    assert wanted in answer
    assert not chat.talk.turns


def test_a_saved_conversation_goes_on(begin, loaded, num_cached, capsys, tmp_path, monkeypatch):
    chat = begin(documents=[NIGHT], system="Be brief.")
    chat.obey("Who?")
    chat.obey(f"/save {tmp_path}/kv")
    loaded.release()
    other = begin(f"-n 12 {ENDLESS} --load {tmp_path}/kv")
    assert "> Who?" in capsys.readouterr().err
    first, second = (it.talk.ids([*it.talk.turns, Turn("Why?")]) for it in (chat, other))
    assert first == second
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # for a progress bar
    other.obey("Why?")
    assert num_cached()[-1] > 100  # the document is not read again
    assert re.search(r"prompt: +(\d+)%", capsys.readouterr().err)[1] != "0"
    both = begin(f"--load {tmp_path}/kv", documents=[NIGHT, ("day.txt", "It was a fine day.")])
    assert [document.name for document in both.talk.documents] == ["night.txt", "day.txt"]
    assert [turn.question for turn in both.talk.turns] == ["Who?"]
    fresh = begin("--max-prompt-tokens 5", folder=tmp_path)
    for line in ("Why?", f"/load {tmp_path}/kv"):
        fresh.obey(line)
    assert [*fresh.talk.documents] == [*chat.talk.documents]  # not cut by the flag of another chat
    fresh.obey("/resume")
    assert ([*fresh.talk.documents], fresh.talk.turns[0].question) == ([], "Why?")


def test_for_documents_the_default_model_names_a_larger_one_that_fits(begin, caplog, monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 5e9)
    with caplog.at_level("INFO", "minitri"):
        begin("--model other", [NIGHT])
        begin(documents=[("day.txt", "It was a fine day.")])
    assert re.findall(r"--model (\S+)", caplog.text) == [name for name in MODELS if "0.5b" in name]


@pytest.mark.parametrize("note", ["", "[1]", "[null, 5, []]", "[null, [[]], []]"])
def test_a_snapshot_of_something_else_is_refused(loaded, note):
    with pytest.raises(InputError, match="the snapshot holds no conversation"):
        Conversation(loaded.tokenizer).restored(note)


def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(begin):
    greedy = f"--temperature 0 {ENDLESS}"
    whole, chat = begin(f"-n 24 {greedy}"), begin(f"-n 12 {greedy}")
    whole.obey("Who?")
    chat.obey("Who?")
    assert len(chat.talk.turns[0].token_ids) == 12
    chat.obey("/continue")
    assert chat.talk.turns == whole.talk.turns


def test_an_answer_is_kept_without_its_end_and_replaced_by_that_of_the_next_seed(begin):
    chat = begin("--min-tokens 3 --logit-bias 2:100")
    chat.obey("Who?")
    chat.obey("Why?")
    first, second = chat.talk.turns
    chat.obey("/regenerate")
    assert [turn.question for turn in chat.talk.turns] == ["Who?", "Why?"]
    assert all(len(turn.token_ids) == 3 and 2 not in turn.token_ids for turn in chat.talk.turns)
    assert chat.talk.turns[0] == first
    assert chat.talk.turns[1] != second


@pytest.mark.parametrize(("event", "times"), [(1, 1), (6, 1), (6, 2)])
def test_a_stopped_answer_stays_and_goes_on(begin, interrupt, event, times):
    chat = begin(f"-n 900 {ENDLESS}")
    interrupt(event, times)
    chat.obey("Who was it? " * 40)
    [turn] = chat.talk.turns
    assert len(turn.token_ids) < 900
    chat.obey("/sampling max_new_tokens=5")
    chat.obey("/continue")
    assert len(chat.talk.turns[0].token_ids) == len(turn.token_ids) + 5


def test_a_document_is_cut_where_it_does_not_fit_or_its_reading_is_stopped(
    begin, num_cached, interrupt, tmp_path, caplog
):
    (tmp_path / "long.txt").write_text("And so on. " * 2000)
    chat = begin()
    chat.obey(f"/documents {tmp_path}/long.txt")
    assert not chat.talk.documents
    interrupt(3)
    chat.obey("/fit")
    [part] = chat.talk.documents
    assert re.search(r"\d+ of \d+ tokens are kept; /documents reads on", caplog.text)
    chat.obey("Who?")
    assert num_cached()[-1] >= len(chat.talk.beginning) - 4
    caplog.clear()
    with caplog.at_level("INFO", "minitri"):
        [chat.obey(line) for line in ("/system Be brief.", "/documents")]
    [whole] = chat.talk.documents
    assert caplog.text.count(f" of {whole.size} tokens") == 2  # by each, once
    assert 64 <= len(part.token_ids) < 1000 < len(whole.token_ids) < whole.size


def test_a_conversation_is_kept_as_text_and_resumed(begin, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    chat = begin(documents=[NIGHT], folder=state_folder())
    for line in ("Who?", "clear", "Why?"):
        chat.obey(line)
    kept = {file: file.read_text() for file in tmp_path.glob("*/*.json")}
    assert "a dark night" in kept[min(kept)]
    chat.obey("/resume")
    assert [turn.question for turn in chat.talk.turns] == ["Who?"]
    assert re.search(r"\d\d:\d\d:\d\d 20\d\d, 'Who\?'", caplog.text)
    assert [document.name for document in chat.talk.documents] == [NIGHT[0]]
    chat.obey("When?")
    assert all(file.read_text() == text for file, text in kept.items())
    assert all(file.stat().st_mode & 0o77 == 0 for file in tmp_path.rglob("*"))


def test_a_saved_conversation_is_in_nobodys_way_and_the_one_used_last_is_resumed_first(
    begin, tmp_path, caplog
):
    first, second = begin(folder=tmp_path), begin(folder=tmp_path)
    for chat, line in ((first, "Who?"), (second, "Why?"), (first, "When?")):
        chat.obey(line)
    first.obey(f"/save {tmp_path}/a.kv")
    second.obey(f"/save {tmp_path}/a.kv")
    assert "a.kv is there" in caplog.text
    later = begin(folder=tmp_path)
    loaded, resumed = f"/load {tmp_path}/a.kv", ["Who?", "When?"]
    lines = {"/resume": resumed, "/resume ": ["Why?"], loaded: resumed, "/reset": []}
    for line, questions in [*lines.items()] * 2:
        later.obey(line)
        assert [turn.question for turn in later.talk.turns] == questions
    for line in (loaded, "/resume"):  # which is not the same again
        later.obey(line)
    assert [turn.question for turn in later.talk.turns] == ["Why?"]


def test_a_resume_that_fails_harms_no_conversation(begin, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = state_folder()
    begin(folder=folder).obey("Who?")
    chat = begin(folder=folder)
    chat.obey("Why?")
    with monkeypatch.context() as patch:
        patch.setattr(chat, "_read", Mock(side_effect=InputError("no memory")))
        chat.obey("/resume")
    chat.obey("When?")
    assert "Why?" in "".join(file.read_text() for file in folder.glob("*.json"))
    for file in folder.glob("*.json"):
        file.write_bytes(b"[\xff")
    assert {*map(title_of, folder.glob("*.json"))} == {""}
    for line in ("clear", "/resume"):
        chat.obey(line)
    assert re.search("no memory.*no earlier conversation", caplog.text, re.S)


def test_without_a_folder_a_chat_goes_on_and_says_so_once(begin, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    chat = begin(folder=state_folder())
    assert chat.obey("Who?") == chat.obey("Why?") == ""
    assert capsys.readouterr().err.count("XDG_STATE_HOME") == 1


def test_too_many_documents_are_refused_or_the_longest_cut(begin):
    texts = {"a.txt": "And so on. " * 2000, "b.txt": "So they say.", "c.txt": "As if. " * 1500}
    with pytest.raises(InputError, match=r"--fit .* --max-prompt-tokens N .* yarn:\d+ "):
        begin(documents=texts)
    chat = begin("--fit -n 12", texts)
    first, second, third = chat.talk.documents
    assert len(second.token_ids) == second.size
    assert second.size < len(first.token_ids) == len(third.token_ids) < third.size
    assert len(chat.talk.beginning) <= 2048 * 3 // 4 + 12
    cut = begin("--max-prompt-tokens 400", texts).talk.documents
    assert 398 <= sum(len(document.token_ids) for document in cut) <= 400


def test_the_oldest_turns_go_where_the_context_is_full(begin, num_cached):
    chat = begin(f"-n 8 {ENDLESS}", documents=[NIGHT], system="Be brief.")
    questions = [f"Question {number}? " + "Who was it? " * 20 for number in range(8)]
    for question in questions:
        chat.obey(question)
        ids = chat.talk.ids(chat.talk.turns)
        assert ids[: len(chat.talk.beginning)] == chat.talk.beginning
        assert num_cached()[-1] >= len(chat.talk.beginning) - 64
        assert len(ids) <= 2048
    kept = [turn.question for turn in chat.talk.turns]
    assert 1 < len(kept) < 8
    assert kept == [question.strip() for question in questions[-len(kept) :]]


def test_a_question_that_never_fits_is_refused_and_a_full_context_ends_an_answer(begin, capsys):
    chat = begin(f"-n 1900 {ENDLESS}")
    chat.obey("Who was it? " * 2000)
    assert re.search(r"tokens too long .*; /reset, or Up .* /documents", capsys.readouterr().err)
    chat.obey("Who was it? " * 180)
    assert len(chat.talk.ids(chat.talk.turns)) == 2048


@pytest.fixture
def typed(tmp_path):
    """What the editor gives for keys, where `obey` returns what failed."""

    def typed(keys: str, obey=lambda line: "") -> list[str]:
        lines = []
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            names = [f"/{name} " for name in COMMANDS]
            at_terminal.ask(tmp_path, names, lambda line: lines.append(line) or obey(line), str)
        return lines

    return typed


KEYS = {
    "\x1b[200~one\r\ntwo\n\nthree\x1b[201~\r": ["one\ntwo\n\nthree"],  # a paste
    "\x1b[200~" + "word " * 10_000 + "\x1b[201~\r": ["word " * 10_000],
    "one\x1b\rtwo\r": ["one\ntwo"],  # Alt-Enter
    "one\\\rtwo\r": ["one\ntwo"],
    "\x1b[200~gcc a.c \\\r\n -o a\x1b[201~\r": ["gcc a.c \\\n -o a"],
    '"""one\rtwo"""\rthree\r': ['"""one\ntwo"""', "three"],
    "Wh\x03Who?\r": ["Who?"],  # Ctrl-C
    "Wer? 🙂 אב\r/hel\t\r": ["Wer? 🙂 אב", "/help "],
}


@pytest.mark.parametrize("keys", KEYS)
def test_a_paste_or_several_lines_are_one_question(typed, keys):
    assert typed(f"{keys}\x04") == KEYS[keys]


def test_a_paste_during_an_answer_is_marked_as_one(tmp_path):
    output, marks = Mock(DummyOutput(), wraps=DummyOutput()), []
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=output):
        pipe.send_text("Who?\r\x04")

        def obey(_: str) -> str:
            marks.append([it[0] for it in output.method_calls if "bracketed" in it[0]][-1])
            return ""

        at_terminal.ask(tmp_path, [], obey, str)
    assert marks == ["enable_bracketed_paste"]
    assert "disable" in [it[0] for it in output.method_calls if "bracketed" in it[0]][-1]


def test_a_question_that_failed_is_edited_and_earlier_lines_and_files_are_found(typed, tmp_path):
    assert typed("Who\r?\r\x04", {"Who": "Who", "Who?": ""}.get) == ["Who", "Who?"]
    assert typed("\x1b[A\r\x04") == typed("\x12Wh\r\r\x04") == ["Who?"]
    assert (typed("Where\x03\x04"), typed("\x1b[A?\r\x04")) == ([], ["Where?"])
    assert typed(f"/load {tmp_path}/his\t\r\x04") == [f"/load {tmp_path}/history"]


TEXT = """\
# Sea\n\nIt was **dark**, <b>he</b> said:\na line.\n\n1. one\n\n```python\na = 1\n\nb = 2\n```\n\n
The end"""
WORDS = "Sea It was dark, <b>he</b> said: a line. 1 one a = 1 b = 2 The end"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_markdown_is_drawn_however_its_text_is_cut_and_nothing_is_left_out(size):
    screen = io.StringIO()
    console = Console(file=screen, width=20, color_system=None)
    with contextlib.closing(at_terminal.MarkdownFile(console=console, transient=True)) as file:
        for start in range(0, len(TEXT), size):
            print(TEXT[start : start + size], end="", flush=True, file=file)
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= 20 and line == line.rstrip() for line in lines)
    assert screen.getvalue().split() == WORDS.split()


def tokenizer(template: str) -> Tokenizer:
    pipeline = byte_level_tokenizer()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"]
    pipeline.add_special_tokens(marks)
    texts = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(pipeline, SpecialTokens(texts=texts), template)


def spelled(tokens: Tokenizer, ids: list[int]) -> str:
    return "".join(tokens.token(token).replace("Ġ", " ").replace("Ċ", "\n") for token in ids)


def conversation(tokens, documents=(), **fields) -> Conversation:
    flags = OneLineParser("chat").parse_args([])
    config = tiny_config(context_length=2048)
    return Conversation(tokens, **fields).with_documents(dict(documents), config, flags)


@pytest.mark.parametrize(("documents", "system"), [((), None), (("One.\n", "Two."), "Be brief.")])
@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_a_conversation_reads_as_if_the_template_had_written_it(template, documents, system):
    tokens = tokenizer(template)
    talk = conversation(tokens, [(text, text) for text in documents], system=system)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = "".join(document.strip() + "\n\n" for document in documents)
    before, turns = talk.beginning, []
    for question, answer in (("Who is Anne?", "A woman."), ("Really?", "Yes."), ("Sure?", "!")):
        messages.append({"role": "user", "content": text + question})
        text = ""
        prompt = talk.ids([*turns, Turn(question)])
        assert prompt[: len(before)] == before
        assert spelled(tokens, prompt) == tokens.render_chat(messages)
        turns.append(Turn(question, tokens.encode_marked(answer)))
        messages.append({"role": "assistant", "content": answer})
        before = talk.ids(turns)
        assert before == prompt + turns[-1].token_ids
    left = talk.slide(turns, len(before) - 1)  # reads as if the first turns had never been
    assert 0 < len(left) < 3
    assert talk.ids(left)[: len(talk.beginning)] == talk.beginning


def test_a_model_without_a_template_gets_plain_questions():
    tokens = tokenizer("")
    talk = conversation(tokens, [("a", "Anne was here.\n")], system="Be brief.")
    prompt = talk.ids([Turn("Who?")])
    assert spelled(tokens, prompt) == "Be brief.\n\nAnne was here.\n\n\nQuestion: Who?\nAnswer:"
    more = talk.ids([Turn("Who?", tokens.encode_marked(" Anne.")), Turn("Why?")])
    assert spelled(tokens, more[len(prompt) :]) == " Anne.\nQuestion: Why?\nAnswer:"
    assert talk.stops == ("\nQuestion: ",)


def test_a_template_that_refuses_or_leaves_out_is_named():
    for template, message in (("same", "leaves questions"), ("{{ raise_exception('X') }}", "X")):
        with pytest.raises(InputError, match=message):
            _ = Conversation(tokenizer(template)).beginning
