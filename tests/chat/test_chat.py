"""The chat as a user has it: piped, and at a terminal."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from minitri.chat.__main__ import main
from tests.conftest import edit_json, write_hf_folder
from tests.loading.test_chat_template import CHATML


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """A tiny model with a chat template and a long context."""
    folder = write_hf_folder(
        tmp_path_factory.mktemp("chat") / "tiny", max_position_embeddings=2048, vocab_size=330
    )
    (folder / "tokenizer_config.json").write_text("{}")
    edit_json(folder / "tokenizer_config.json", chat_template=CHATML)
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)  # answers do not end by themselves
    return folder


def flags(folder, *more: str) -> list[str]:
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu", *more]


def chat(folder, questions: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minitri.chat", *flags(folder, *more)]
    return subprocess.run(command, input=questions, text=True, capture_output=True, check=False)


def test_piped_questions_are_answered_and_commands_obeyed(instruct, tmp_path):
    document, kv = tmp_path / "d.txt", tmp_path / "talk.kv"
    document.write_text("It was a dark night. " * 20)
    said = chat(
        instruct,
        f"Who?\n\n/stats\nAnd why?\n/save {kv}\n/nonsense\n/temperature hot\n/temperature 0\n"
        "/color\n/save /no/such/folder/x\n/load /no/such/file\n/quit\nnever asked\n",
        "--document",
        str(document),
        "-n",
        "12",
    )
    assert said.returncode == 0
    assert "tokens of documents, read in" in said.stderr
    assert "tokens were in the KV cache" in said.stderr
    assert "/temperature T" in said.stderr
    assert "temperature is 'hot'; give a number" in said.stderr
    assert "cannot write /no/such/folder/x" in said.stderr
    assert "there is no KV snapshot /no/such/file" in said.stderr
    assert "Traceback" not in said.stderr
    assert "never asked" not in said.stdout
    assert kv.exists()
    again = chat(instruct, "And now?\n/stats\n", "--load", str(kv), "-n", "4")
    assert again.returncode == 0
    [line] = [it for it in again.stderr.splitlines() if "were in the KV cache" in it]
    assert int(line.split("; ")[1].split()[0]) > 100


def test_the_second_question_reads_little(instruct, tmp_path, capsys, monkeypatch):
    document = tmp_path / "d.txt"
    document.write_text("It was a dark night. " * 40)
    lines = iter(["Who?\n", "/stats\n", ""])
    monkeypatch.setattr(
        sys,
        "stdin",
        type("Lines", (), {"readline": lambda _: next(lines), "isatty": lambda _: False})(),
    )
    main(flags(instruct, "--document", str(document), "-n", "8"))
    shown = capsys.readouterr()
    [line] = [it for it in shown.err.splitlines() if it.startswith("prefill")]
    num_read, num_all = int(line.split()[1]), int(line.split()[3])
    assert num_read < 0.2 * num_all


def test_bad_flags_and_documents_are_one_line(instruct, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("word " * 5000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for more, message in (
        (["--document", "missing.txt"], "cannot read"),
        (["--document", str(tmp_path / "binary")], "is not UTF-8 text"),
        (["--document", str(tmp_path / "long.txt")], "prompt has"),
        (["--temperature", "-1"], "temperature"),
        (["--load", "missing.kv"], "there is no KV snapshot missing.kv"),
    ):
        with pytest.raises(SystemExit) as end:
            main(flags(instruct, *more))
        assert end.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def reader(terminal: int):
    """Reads on to a text, and no further: what was shown at once with it is for the next call."""
    shown = ""

    def read_until(text: str) -> str:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, shown
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    shown += os.read(terminal, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    raise AssertionError(shown) from None
        before, _, shown = shown.partition(text)
        return before + text

    return read_until


def test_at_a_terminal_ctrl_c_stops_an_answer_only(instruct):
    terminal, other = pty.openpty()
    read_until = reader(terminal)
    command = [sys.executable, "-m", "minitri.chat", *flags(instruct), "-n", "1900"]
    with subprocess.Popen(
        command,
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"},
        preexec_fn=_take_terminal,
    ) as process:
        try:
            os.close(other)
            read_until("Ctrl-D leaves")
            read_until(">")
            os.write(terminal, b"Tell me everything\r")
            read_until("everything")
            time.sleep(0.5)
            os.write(terminal, b"\x03")
            assert "(stopped after" in read_until("tokens)")
            read_until(">")
            os.write(terminal, b"/stats\r")
            assert "tokens in" in read_until("memory")
            os.write(terminal, b"/quit\r")
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    os.close(terminal)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
