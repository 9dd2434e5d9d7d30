"""The chat as a user has it, piped or at a terminal; and the conversation that it keeps."""

import dataclasses
import fcntl
import itertools
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

import minitri
from minitri import InputError
from minitri.apps.chat.__main__ import COMMANDS, Chat, build_parser, main
from minitri.apps.chat.conversation import Conversation, Turn
from minitri.core.log import log
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer, edit_json, write_hf_folder
from tests.core.rigs import tiny_config
from tests.files.test_chat_template import CHATML, LLAMA3


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """A tiny model with a chat template and a long context, whose answers do not end."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    write_hf_folder(folder, max_position_embeddings=2048, vocab_size=330)
    (folder / "tokenizer_config.json").write_text("{}")
    edit_json(folder / "tokenizer_config.json", chat_template=CHATML)
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)
    return folder


@pytest.fixture
def chat(instruct, capfd, monkeypatch):
    """Types lines into a chat; gives its answers and its messages."""

    def chat(lines: str, *flags: str) -> tuple[str, str]:
        reading, writing = os.pipe()
        os.write(writing, lines.encode())
        os.close(writing)
        with os.fdopen(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with pytest.raises(SystemExit) as ended:
                main(["--model", str(instruct), "--dtype", "float32", "--device", "cpu", *flags])
            assert not ended.value.code
        return capfd.readouterr()

    return chat


READ = r"for (\d+) tokens of the prompt"


def test_piped_questions_are_answered_and_commands_obeyed(chat, tmp_path):
    documents = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for document in documents:
        document.write_text("It was a dark night. " * 20)
    lines = ["Who?", "", f"/save {tmp_path}/kv", "And why?", "/reset", "/quit", "never"]
    flags = ("--document", *map(str, documents), "-n", "12", "-v")
    out, err = chat("\n".join(lines), *flags, "--color")
    for told in ("cut after 12 tokens", "float32 on cpu; temperature 0.7, top_p 0.9, seed"):
        assert told in err
    assert "never" not in out
    assert "\x1b" in out
    assert int(re.findall(READ, err)[-1]) < 100  # for the second question
    out, err = chat("And now?\n/nonsense", "--load", f"{tmp_path}/kv", "-n", "4", "-v")
    assert "> Who?" in err
    assert "no /nonsense" in err
    assert int(re.findall(READ, err)[0]) < 100


@pytest.fixture(scope="module")
def loaded(instruct):
    return minitri.load(str(instruct), dtype="float32", device="cpu")


@pytest.fixture
def num_cached(loaded, monkeypatch):
    """Of each run how many tokens were not read again."""
    runs = []
    real = loaded.generate
    monkeypatch.setattr(loaded, "generate", lambda *a, **b: runs.append(real(*a, **b)) or runs[-1])
    return lambda: [run.rows[0].stats.num_cached_tokens for run in runs]


@pytest.fixture
def begin(loaded, monkeypatch, capsys):
    """Starts a chat as with --quiet; gives it with its conversation."""
    monkeypatch.setattr(log, "handlers", [logging.lastResort])
    loaded.release()
    capsys.readouterr()

    def begin(flags: str = "-n 12", documents=(), **made) -> Chat:
        args = build_parser().parse_args(f"--seed 1 --prefill-chunk 64 {flags}".split())
        talk = Conversation(loaded.tokenizer, **made)
        return Chat(loaded, talk.with_documents(dict(documents), loaded.config, args), args)

    return begin


def conversation(tokens, documents=(), **made) -> Conversation:
    flags = build_parser().parse_args([])
    config = tiny_config(context_length=2048)
    return Conversation(tokens, **made).with_documents(dict(documents), config, flags)


def press(monkeypatch, event: int, times: int = 1) -> None:
    """Ctrl-C before the event of this number."""
    events = itertools.count(1)

    def next_event(run, real=minitri.Generation.__next__):
        if next(events) == event:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return real(run)

    monkeypatch.setattr(minitri.Generation, "__next__", next_event)


TOLD = """
/nonsense | there is no /nonsense; /help lists
/regenrate | did you mean /regenerate?
/regenerate | there is no answer yet
/continue | there is no answer yet
/show | there is no answer yet
/temperature hot | temperature is 'hot'
/temperature -1 | temperature is -1
/temperature | temperature is ''
/temperature 0 | temperature=0.0,
/sampling top_p=0.5 seed=7 max_new_tokens=3 | min_tokens=0, seed=7, max_new_tokens=3
/sampling presence_penalty=0.5 | presence_penalty=0.5, frequency_penalty=0.0
/sampling bad_words=the | bad_words is not a setting
/sampling presence_penalty=9 | presence_penalty is 9.0; it must be
/sampling top-p=0.5 | top-p is not a setting; did you mean top_p?
/sampling top_k=1.5 | top_k is '1.5'
/sampling seed=-1 | seed is
/sampling max_new_tokens=0 | max_new_tokens is 0
/save | /save needs FILE
/save x | there is no KV cache to save
/load /no/such/file | /no/such/file
/documents /no/such/file | /documents /no/such/file cannot be read (No such file
/documents / | /documents / is a folder
/documents | there are no documents
/system | as the model has it
/system Be brief. | system: Be brief.
/reset | questions and answers are forgotten
"""


@pytest.mark.parametrize("line", TOLD.strip().splitlines())
def test_a_command_is_answered_in_one_line(begin, capsys, line):
    chat = begin()
    typed, wanted = line.split(" | ")
    chat.obey(typed)
    [told] = capsys.readouterr().err.splitlines()
    assert wanted in told
    assert not chat.talk.turns


def test_help_lists_what_there_is(begin, capsys):
    begin().obey("/help")
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == [f"/{name}" for name in COMMANDS]


def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(begin):
    whole = begin("-n 24 --temperature 0")
    whole.obey("Who?")
    chat = begin("-n 12 --temperature 0")
    chat.obey("Who?")
    [first] = chat.talk.turns
    assert len(first.token_ids) == 12
    chat.obey("/continue")
    assert chat.talk.turns == whole.talk.turns


def test_an_answer_is_replaced_by_that_of_the_next_seed(begin, capsys):
    chat = begin()
    chat.obey("Who?")
    chat.obey("Why?")
    first, second = chat.talk.turns
    chat.obey("/regenerate")
    assert chat.talk.turns[0] == first
    assert (chat.talk.turns[1].question, len(chat.talk.turns)) == ("Why?", 2)
    assert chat.talk.turns[1].token_ids != second.token_ids
    chat.talk = dataclasses.replace(chat.talk, turns=[Turn("Why?", [5])])
    chat.obey("/continue")
    assert chat.talk.turns == [Turn("Why?", [5])]
    assert "the last answer is complete" in capsys.readouterr().err


@pytest.mark.parametrize("times", [1, 2])
def test_a_stopped_answer_stays_and_goes_on(begin, monkeypatch, times):
    chat = begin("-n 900")
    press(monkeypatch, 6, times)
    chat.obey("Who?")
    [turn] = chat.talk.turns
    assert turn.is_cut
    assert 0 < len(turn.token_ids) < 900
    chat.obey("/sampling max_new_tokens=5")
    chat.obey("/continue")
    assert len(chat.talk.turns[0].token_ids) == len(turn.token_ids) + 5


def test_an_answer_stopped_before_it_began_may_begin_later(begin, monkeypatch):
    chat = begin()
    press(monkeypatch, 1)
    chat.obey("Who was it? " * 40)
    assert chat.talk.turns == [Turn("Who was it? " * 40, [], is_cut=True)]
    chat.obey("/continue")
    assert len(chat.talk.turns[0].token_ids) == 12


NIGHT = ("night.txt", "It was a dark night. " * 60)


def test_documents_that_are_stopped_stay_as_far_as_they_were_read(
    begin, num_cached, monkeypatch, capsys
):
    press(monkeypatch, 3)
    chat = begin(documents=[NIGHT])
    part = len(chat.talk.beginning)
    size = chat.talk.documents[0].size
    assert len(chat.talk.start) < part < size
    assert "/documents goes on" in capsys.readouterr().err
    chat.obey("Who?")
    assert part < len(chat.talk.ids(chat.talk.turns)) < size
    assert num_cached()[-1] > part // 2
    chat.obey("/documents")
    assert f"{size} of {size} tokens" in capsys.readouterr().err
    assert len(chat.talk.beginning) > size
    assert num_cached()[-1] > part // 2
    chat.obey("/documents")
    assert len(num_cached()) == 3


def test_too_many_documents_are_refused_or_the_longest_cut(begin):
    many = [
        ("a.txt", "And so on. " * 2000),
        ("b.txt", "So they say."),
        ("c.txt", "So they say. " * 1500),
    ]
    with pytest.raises(InputError, match=r"--fit .* --max-prompt-tokens N .* yarn:\d+ "):
        begin(documents=many)
    chat = begin("--fit -n 12", many)
    first, second, third = chat.talk.documents
    assert len(second.token_ids) == second.size
    assert second.size < len(first.token_ids) == len(third.token_ids) < third.size
    assert len(chat.talk.beginning) <= chat._engine.config.context_length * 3 // 4 + 12
    cut = begin("--max-prompt-tokens 400", many).talk.documents
    assert 398 <= sum(len(it.token_ids) for it in cut) <= 400


def test_the_oldest_turns_go_where_the_context_is_full(begin, num_cached):
    chat = begin("-n 200", documents=[NIGHT], system="Be brief.")
    context = chat._engine.config.context_length
    for number in range(12):
        chat.obey(f"Question {number}?")
        ids, beginning = chat.talk.ids(chat.talk.turns), chat.talk.beginning
        assert ids[: len(beginning)] == beginning
        assert num_cached()[-1] >= len(beginning) - 64
        assert len(ids) <= context
    kept = [turn.question for turn in chat.talk.turns]
    assert 1 < len(kept) < 12
    assert kept == [f"Question {number}?" for number in range(12)][-len(kept) :]


def test_a_question_that_never_fits_is_refused_and_a_full_context_told(begin, capsys):
    chat = begin("-n 1900")
    chat.obey("Who was it? " * 2000)
    assert "ask something shorter, or /reset" in capsys.readouterr().err
    chat.obey("Who was it? " * 150)
    [turn] = chat.talk.turns
    assert len(chat.talk.ids([turn])) == chat._engine.config.context_length
    assert turn.is_cut


@pytest.mark.parametrize("flags", ["--load missing.kv", f"--document {__file__}"])
def test_what_cannot_begin_is_one_line(instruct, call, flags):
    done = call(main, "--quiet", "--model", instruct, "--device", "cpu", *flags.split())
    [line] = done.err.splitlines()
    assert done.code == 2
    assert ("missing.kv" if "--load" in flags else "--fit") in line


def test_at_a_terminal_ctrl_c_stops_an_answer_or_a_line_and_ctrl_d_leaves(instruct):
    terminal, other = pty.openpty()
    shown = ""

    def read_until(text: str) -> str:
        """Reads on to a text, and no further: what comes at once with it is for the next call."""
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace")
        before, _, shown = shown.partition(text)
        return before + text

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits it ignored

    command = [sys.executable, "-m", "minitri", "chat", "--model", str(instruct), "-n", "1900"]
    with subprocess.Popen(
        [*command, "--dtype", "float32", "--device", "cpu"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), other),
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
        preexec_fn=own_terminal,
    ) as process:
        try:
            os.close(other)
            read_until("Ctrl-D leaves")
            read_until(">")
            os.write(terminal, b"Tell me everything\r")
            read_until("everything")
            time.sleep(0.5)
            os.write(terminal, b"\x03")
            half = b"half a line"
            steps = [("stopped", b""), (">", half), ("a line", b"\x03"), ("/quit or", b"")]
            for shown_first, typed in (*steps, (">", b"And now?\r")):
                read_until(shown_first)
                time.sleep(0.2)
                os.write(terminal, typed)
                if typed == b"\x03":  # between prompt and waiting it is noticed at the next key
                    time.sleep(0.5)
                    os.write(terminal, b" ")
            read_until("now?")
            time.sleep(0.5)
            os.write(terminal, b"\x04")  # while it answers
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    os.close(terminal)


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def tokenizer(template: str | None) -> Tokenizer:
    pipeline = byte_level_tokenizer()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"]
    pipeline.add_special_tokens(marks)
    return Tokenizer(TokenizersBackend(pipeline), None, template, SPECIAL)


def spelled(tokens: Tokenizer, ids: list[int]) -> str:
    return tokens._backend._pipeline.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("documents", [(), ("One.\n", "Two.")])
@pytest.mark.parametrize("template", [CHATML, LLAMA3])
@pytest.mark.parametrize("ends", [True, False])
def test_it_reads_as_if_the_template_had_written_all_of_it(template, documents, system, ends):
    tokens = tokenizer(template)
    end = "<|im_end|>" if template is CHATML else "<|eot_id|>"
    talk = conversation(tokens, [(text, text) for text in documents], system=system)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = "".join(document.strip() + "\n\n" for document in documents)
    before, turns = talk.beginning, []
    for question, answer in (("Who is Anne?", "A woman."), ("Really?", "Yes."), ("Sure?", "!")):
        messages.append({"role": "user", "content": text + question})
        text = ""
        prompt = talk.ids([*turns, Turn(question)])
        assert prompt[: len(before)] == before
        assert spelled(tokens, prompt) == tokens.chat_template.render(messages)
        ids = tokens.encode_marked(answer + end * ends)
        turns.append(Turn(question, ids, is_cut=not ends))
        messages.append({"role": "assistant", "content": answer})
        before = talk.ids(turns)
        assert before == prompt + ids
    left = talk.slide(turns, len(before) - 1)  # reads as if the first turns had never been
    assert 0 < len(left) < 3
    assert talk.ids(left)[: len(talk.beginning)] == talk.beginning


def test_a_model_without_a_template_gets_plain_questions():
    tokens = tokenizer(None)
    talk = conversation(tokens, [("a", "Anne was here.\n")], system="Be brief.")
    prompt = talk.ids([Turn("Who?")])
    assert spelled(tokens, prompt) == "Be brief.\n\nAnne was here.\n\n\nQuestion: Who?\nAnswer:"
    turn = Turn("Who?", tokens.encode_marked(" Anne."))
    more = talk.ids([turn, Turn("Why?")])
    assert spelled(tokens, more[len(prompt) :]) == " Anne.\nQuestion: Why?\nAnswer:"
    assert talk.stops == ("\nQuestion: ",)


def test_it_goes_on_where_it_was_saved():
    talk = conversation(tokenizer(CHATML), [("a", "One.")], system="Be brief.")
    turns = [Turn("Who?", [5, 6], is_cut=True)]
    talk = dataclasses.replace(talk, turns=turns, most=len(talk.start) + 2)
    other = Conversation(talk.tokenizer).restored(talk.as_note())
    assert other == talk
    assert other.ids([*other.turns, Turn("Why?")]) == talk.ids([*turns, Turn("Why?")])


@pytest.mark.parametrize("note", ["", "[1]", "[null, 5, [], 3]", "[null, [[]], [], 3]"])
def test_a_snapshot_of_something_else_is_refused(note):
    with pytest.raises(InputError, match="the snapshot holds no conversation"):
        Conversation(tokenizer(CHATML)).restored(note)


def test_a_template_that_refuses_or_leaves_out_is_named():
    with pytest.raises(InputError, match="leaves questions out"):
        _ = Conversation(tokenizer("always the same")).start
    with pytest.raises(InputError, match="no, thanks"):
        _ = Conversation(tokenizer("{{ raise_exception('no, thanks') }}")).start
