"""The chat as a user has it, piped or at a terminal; and the conversation that it keeps."""

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
from minitri.chat.__main__ import build_parser, main
from minitri.chat.commands import Chat
from minitri.chat.conversation import Conversation, Turn
from minitri.chat.words import ALIASES, COMMANDS, HELP, LEAVE, UNANSWERED
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
from minitri.log import log
from tests.conftest import byte_level_tokenizer, edit_json, write_hf_folder
from tests.loading.test_chat_template import CHATML, LLAMA3


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
    lines = ["Who?", "", f"/save {tmp_path}/kv", "And why?", "/stats", "/reset", "/quit", "never"]
    flags = ("--document", *map(str, documents), "-n", "12")
    out, err = chat("\n".join(lines), *flags, "--color")
    for told in ("tokens of documents are read", "cut after 12 tokens", "0.7, 'top_p': 0.9"):
        assert told in err
    assert "never" not in out
    assert "\x1b" in out
    assert int(re.findall(READ, err)[-1]) < 100  # for the second question
    out, err = chat("And now?\n/stats\n/nonsense", "--load", f"{tmp_path}/kv", "-n", "4", "-q")
    assert "> Who?" in err
    assert "no /nonsense" in err
    assert int(re.findall(READ, err)[0]) < 100
    assert "tokens of documents are read" not in err


@pytest.fixture(scope="module")
def loaded(instruct):
    return minitri.load(str(instruct), dtype="float32", device="cpu")


@pytest.fixture
def begin(loaded, monkeypatch, capsys):
    """Starts a chat as with --quiet; gives it with its conversation."""
    monkeypatch.setattr(log, "handlers", [logging.lastResort])
    loaded.release()
    capsys.readouterr()

    def begin(flags: str = "-n 12", documents=(), **made) -> tuple[Chat, Conversation]:
        args = build_parser().parse_args(f"--seed 1 --prefill-chunk 64 {flags}".split())
        talk = Conversation(loaded.tokenizer, documents=documents, **made)
        return Chat(loaded, talk, args), talk

    return begin


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
/stats | there is no answer yet
/show | nothing has been said yet
/temperature hot | temperature is 'hot'
/temperature -1 | temperature is -1
/temperature | /temperature needs T
/temperature 0 | temperature=0,
/sampling top-p=0.5 seed=7 max_new_tokens=3 | top_p=0.5, min_p=0.0, seed=7, max_new_tokens=3
/sampling tmp=1 | tmp is no setting
/sampling top_k=1.5 | top_k is 1.5
/sampling seed=-1 | seed is
/sampling max_new_tokens=0 | max_new_tokens is 0
/save | /save needs FILE
/save x | there is no KV cache to save
/load /no/such/file | /no/such/file
/document /no/such/file | cannot read the document /no/such/file
/document / | is a folder
/documents | there are no documents
/system | as the model has it
/system Be brief. | system: Be brief.
/clear | questions and answers are forgotten
"""


@pytest.mark.parametrize("line", TOLD.strip().splitlines())
def test_a_command_is_answered_in_one_line(begin, capsys, line):
    chat, talk = begin()
    typed, wanted = line.split(" | ")
    chat.obey(typed)
    [told] = capsys.readouterr().err.splitlines()
    assert wanted in told
    assert not talk.turns


def test_help_lists_what_there_is(begin, capsys):
    begin()[0].obey("/help")
    assert capsys.readouterr().err == f"{HELP}\n"
    methods = {name.removeprefix("do_") for name in vars(Chat) if name.startswith("do_")}
    assert methods | {"quit"} == {*COMMANDS} >= {*ALIASES.values()}


def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(begin):
    chat, whole = begin("-n 24 --temperature 0")
    chat.obey("Who?")
    chat, talk = begin("-n 12 --temperature 0")
    chat.obey("Who?")
    first = talk.turns
    chat.obey("/continue")
    assert [len(turn.token_ids) for turn in (*first, *talk.turns)] == [12, 24]
    assert talk.turns[0].token_ids == whole.turns[0].token_ids


def test_an_answer_is_replaced_by_that_of_the_next_seed(begin, capsys):
    chat, talk = begin()
    chat.obey("Who?")
    chat.obey("Why?")
    first, second = talk.turns
    chat.obey("/regenerate")
    assert talk.turns[0] == first
    assert (talk.turns[1].question, len(talk.turns)) == ("Why?", 2)
    assert talk.turns[1].token_ids != second.token_ids
    talk.turns[1] = Turn("Why?", [5], "x", "<end>")
    chat.obey("/temperature 0")
    chat.obey("/regenerate")
    chat.obey("/continue")
    assert talk.turns[1].token_ids == [5]
    assert "would be the same" in (told := capsys.readouterr().err)
    assert "the last answer is complete" in told


@pytest.mark.parametrize("times", [1, 2])
def test_a_stopped_answer_stays_and_goes_on(begin, monkeypatch, times):
    chat, talk = begin("-n 900")
    press(monkeypatch, 6, times)
    chat.obey("Who?")
    [turn] = talk.turns
    assert turn.is_cut
    assert 0 < len(turn.token_ids) < 900
    chat.obey("/sampling max_new_tokens=5")
    chat.obey("/continue")
    assert len(talk.turns[0].token_ids) == len(turn.token_ids) + 5


def test_a_question_stopped_before_its_answer_is_not_kept(begin, monkeypatch, capsys):
    chat, talk = begin()
    press(monkeypatch, 1)
    chat.obey("Who was it? " * 40)
    assert not talk.turns
    assert UNANSWERED in capsys.readouterr().err


NIGHT = ("night.txt", "It was a dark night. " * 60)


def test_documents_that_are_stopped_stay_as_far_as_they_were_read(begin, monkeypatch, capsys):
    press(monkeypatch, 3)
    chat, talk = begin(documents=[NIGHT])
    part = talk.num_kept
    assert 0 < part < talk.opening.num_tokens
    assert f"about {part} of {talk.opening.num_tokens} tokens" in capsys.readouterr().err
    chat.obey("/system Be brief.")
    assert talk.num_kept == part
    chat.obey("Who?")
    assert part < len(talk.ids(talk.turns)) < talk.opening.num_tokens
    assert chat._last.rows[0].stats.num_cached_tokens > part // 2
    chat.obey("/read")
    assert f"{talk.num_kept:,} of {talk.num_kept:,}" in capsys.readouterr().err
    assert talk.num_kept == talk.opening.num_tokens
    assert chat._last.rows[0].stats.num_cached_tokens > part // 2
    assert talk.ids([])[:part] == talk.opening.token_ids[:part]


def test_too_many_documents_are_refused_or_cut_at_their_end(begin, capsys):
    many = [NIGHT, ("b.txt", "And so on. " * 2000)]
    with pytest.raises(InputError, match=r"--fit .* --max-prompt-tokens N .* yarn:\d+ "):
        begin(documents=many)
    chat, talk = begin("--fit -n 12", many)
    assert len(talk.beginning) <= chat._engine.config.context_length * 3 // 4 + 2
    assert talk.opening.sizes[0] < talk.num_kept < talk.opening.num_tokens
    assert begin("--max-prompt-tokens 40", many)[1].num_kept == 40


def test_the_oldest_turns_go_where_the_context_is_full(begin, monkeypatch):
    chat, talk = begin("-n 200", documents=[NIGHT], system="Be brief.")
    context = chat._engine.config.context_length
    for number in range(12):
        chat.obey(f"Question {number}?")
        assert talk.ids(talk.turns)[: len(talk.beginning)] == talk.beginning
        assert chat._last.rows[0].stats.num_cached_tokens >= len(talk.beginning) - 64
        assert len(talk.ids(talk.turns)) <= context
    kept = [turn.question for turn in talk.turns]
    assert 1 < len(kept) < 12
    assert kept == [f"Question {number}?" for number in range(12)][-len(kept) :]


def test_a_question_that_never_fits_is_refused_and_a_full_context_told(begin, capsys):
    chat, talk = begin("-n 1900")
    chat.obey("Who was it? " * 2000)
    assert "ask something shorter, or /reset" in capsys.readouterr().err
    chat.obey("Who was it? " * 150)
    [turn] = talk.turns
    assert len(talk.ids(talk.turns)) == chat._engine.config.context_length
    assert turn.is_cut


@pytest.mark.parametrize("flags", ["--load missing.kv", f"--document {__file__}"])
def test_what_cannot_begin_is_one_line(instruct, call, flags):
    done = call(main, "--quiet", "--model", instruct, "--device", "cpu", *flags.split())
    [line] = done.err.splitlines()
    assert done.code == 2
    assert ("missing.kv" if "--load" in flags else "--fit") in line


def test_at_a_terminal_ctrl_c_stops_an_answer_or_a_line_and_twice_leaves(instruct):
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

    command = [sys.executable, "-m", "minitri.chat", "--model", str(instruct), "-n", "1900"]
    with subprocess.Popen(
        [*command, "--dtype", "float32", "--device", "cpu"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), other),
        start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
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
            steps = [("stopped", b""), (">", half), ("a line", b"\x03"), (">", b"\x03")]
            for shown_first, typed in (*steps, (LEAVE, b""), (">", b"\x03")):
                read_until(shown_first)
                time.sleep(0.2)  # a Ctrl-C between prompt and waiting is noticed at the next key
                os.write(terminal, typed)
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
    named = [(text, text) for text in documents]
    talk = Conversation(tokens, system=system, documents=named)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = "".join(document.strip() + "\n\n" for document in documents)
    before, turns = talk.beginning, []
    sizes = [len(tokens.encode_marked(document.strip() + "\n\n")) for document in documents]
    assert talk.opening.sizes == sizes
    for question, answer in (("Who is Anne?", "A woman."), ("Really?", "Yes."), ("Sure?", "!")):
        messages.append({"role": "user", "content": text + question})
        text = ""
        prompt = talk.ids([*turns, Turn(question)])
        assert prompt[: len(before)] == before
        assert spelled(tokens, prompt) == tokens.chat_template.render(messages)
        ids = tokens.encode_marked(answer + end * ends)
        turns.append(Turn(question, ids, answer, end if ends else ""))
        messages.append({"role": "assistant", "content": answer})
        before = talk.ids(turns)
        assert before == prompt + ids
    left = talk.slide(turns, len(before) - 1)  # reads as if the first turns had never been
    assert 0 < len(left) < 3
    never = Conversation(tokens, system=system, documents=named)
    assert talk.ids(left)[: len(talk.beginning)] == never.beginning
    assert never.ids([Turn(left[0].question)]) == talk.ids([Turn(left[0].question)])


def test_a_model_without_a_template_gets_plain_questions():
    tokens = tokenizer(None)
    talk = Conversation(tokens, system="Be brief.", documents=[("a", "Anne was here.\n")])
    prompt = talk.ids([Turn("Who?")])
    assert spelled(tokens, prompt) == "Be brief.\n\nAnne was here.\n\n\nQuestion: Who?\nAnswer:"
    turn = Turn("Who?", tokens.encode_marked(" Anne."))
    more = talk.ids([turn, Turn("Why?")])
    assert spelled(tokens, more[len(prompt) :]) == " Anne.\nQuestion: Why?\nAnswer:"
    assert talk.stops == ("\nQuestion: ",)


def test_it_goes_on_where_it_was_saved():
    talk, other = (
        Conversation(tokenizer(CHATML), documents=[(name, name)]) for name in ("One.", "Two.")
    )
    talk.open(talk.opening, 2)
    talk.turns = [Turn("Who?", [5, 6], "She.", "<|im_end|>", True)]
    other.restore(talk.as_note())
    assert other.ids([*other.turns, Turn("Why?")]) == talk.ids([*talk.turns, Turn("Why?")])
    assert other.turns[0].is_cut
    assert (other.num_kept, other.opening.num_tokens) == (2, talk.opening.num_tokens)


@pytest.mark.parametrize("note", ["", "[1]", '{"documents": 5}'])
def test_a_snapshot_of_something_else_is_refused(note):
    talk = Conversation(tokenizer(CHATML))
    before = talk.ids([Turn("Who?")])
    with pytest.raises(InputError, match="the snapshot holds no conversation"):
        talk.restore(note)
    assert talk.ids([Turn("Who?")]) == before


def test_a_template_that_refuses_or_leaves_out_is_named():
    with pytest.raises(InputError, match="leaves questions out"):
        Conversation(tokenizer("always the same"))
    with pytest.raises(InputError, match="no, thanks"):
        Conversation(tokenizer("{{ raise_exception('no, thanks') }}"))
