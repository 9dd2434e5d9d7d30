"""The chat as a user has it, piped or at a terminal; and the conversation that it keeps."""

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest

from minitri import InputError
from minitri.chat.__main__ import main
from minitri.chat.conversation import Conversation
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
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
    document = tmp_path / "d.txt"
    document.write_text("It was a dark night. " * 40)
    commands = ["/nonsense", "/temperature hot", "/temperature -1", "/temperature 0", "/stats"]
    commands += ["/save", "/save /no/such/folder/x", "/load /no/such/file", f"/save {tmp_path}/kv"]
    lines = ["Who?", "", *commands, "And why?", "/stats", "/reset", "/quit", "never asked"]
    out, err = chat("\n".join(lines), "--document", str(document), "-n", "12", "--color")
    for told in ("tokens of documents are read", "/temperature T"):
        assert told in err
    for wrong in ("temperature is 'hot'", "temperature is -1", "/no/such/folder/x", "/such/file"):
        assert wrong in err
    assert "never asked" not in out
    assert "\x1b" in out
    assert int(re.findall(READ, err)[-1]) < 100  # for the second question
    err = chat("And now?\n/stats\n", "--load", f"{tmp_path}/kv", "-n", "4")[1]
    assert int(re.findall(READ, err)[0]) < 100


@pytest.mark.parametrize("flags", ["--load missing.kv", f"--document {__file__}"])
def test_what_cannot_begin_is_one_line(instruct, call, flags):
    done = call(main, "--quiet", "--model", instruct, "--device", "cpu", *flags.split())
    [line] = done.err.splitlines()
    assert done.code == 2
    assert ("missing.kv" if "--load" in flags else "prompt has") in line


def test_at_a_terminal_ctrl_c_stops_an_answer_only(instruct):
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
            assert "(interrupted after" in read_until("tokens)")
            read_until(">")
            os.write(terminal, b"/quit\r")
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
    talk = Conversation(tokens, system=system, documents=documents)
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = "".join(document.strip() + "\n\n" for document in documents)
    before = talk.beginning
    for question, answer in (("Who is Anne?", "A woman."), ("Really?", "Yes."), ("Sure?", "!")):
        messages.append({"role": "user", "content": text + question})
        text = ""
        prompt = talk.ask(question)
        assert prompt[: len(before)] == before
        assert spelled(tokens, prompt) == tokens.chat_template.render(messages)
        ids = tokens.encode_marked(answer + end * ends)
        talk.answered(prompt, ids, end if ends else "")
        messages.append({"role": "assistant", "content": answer})
        before = talk.tokens
        assert before == prompt + ids


def test_a_model_without_a_template_gets_plain_questions():
    tokens = tokenizer(None)
    talk = Conversation(tokens, system="Be brief.", documents=["Anne was here.\n"])
    prompt = talk.ask("Who?")
    assert spelled(tokens, prompt) == "Be brief.\n\nAnne was here.\n\n\nQuestion: Who?\nAnswer:"
    talk.answered(prompt, tokens.encode_marked(" Anne."))
    assert spelled(tokens, talk.ask("Why?")[len(prompt) :]) == " Anne.\nQuestion: Why?\nAnswer:"
    assert talk.stops == ("\nQuestion: ",)


def test_what_is_forgotten_leaves_the_documents_and_it_goes_on_where_it_was_saved():
    talk, other = (Conversation(tokenizer(CHATML), documents=[name]) for name in ("One.", "Two."))
    first = talk.ask("Who?")
    talk.answered(first, [5, 6], "<|im_end|>")
    other.restore(talk.as_note())
    assert other.ask("Why?") == talk.ask("Why?")
    other.tokens = []
    assert talk.beginning == other.beginning == first[: len(other.beginning)]


@pytest.mark.parametrize("note", ["", "[1]", '{"documents": 5}'])
def test_a_snapshot_of_something_else_is_refused(note):
    talk = Conversation(tokenizer(CHATML))
    before = talk.ask("Who?")
    with pytest.raises(InputError, match="the snapshot holds no conversation"):
        talk.restore(note)
    assert talk.ask("Who?") == before


def test_a_template_that_refuses_or_leaves_out_is_named():
    with pytest.raises(InputError, match="leaves questions out"):
        Conversation(tokenizer("always the same"))
    with pytest.raises(InputError, match="no, thanks"):
        Conversation(tokenizer("{{ raise_exception('no, thanks') }}"))
