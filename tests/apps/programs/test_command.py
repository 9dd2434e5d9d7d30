"""The command `minitri`: habits that its programs keep, and what a shell may do to them."""

import io
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import minitri
from minitri import __main__ as command
from minitri import generate
from minitri.apps import bench, plan
from minitri.apps.chat import __main__ as chat
from minitri.apps.cli import exits, inputs
from minitri.apps.cli.pytorch import import_pytorch
from minitri.apps.selftest import __main__ as selftest
from minitri.apps.serve import __main__ as serve
from minitri.core.errors import InputError
from minitri.text.tokenizer import Tokenizer
from tests.conftest import edit_json

PROMPT = "She had been forced into prudence in her youth"


@pytest.mark.parametrize("program", [generate, plan, bench, selftest, chat, serve])
def test_a_program_is_a_word_of_the_command(run, program):
    name = program.__name__.removesuffix(".__main__").split(".")[-1]
    help_text = run("--help", program=program.main, model=None)
    assert run(name, "--help", model=None) == help_text
    assert f"  minitri {name} " in help_text.out
    assert f"  {name} " in command.HELP
    assert run("--version", program=program.main, model=None).out.startswith("minitri 0")


def test_a_text_goes_on_with_and_without_the_name_of_a_program(run):
    wanted = run("--prompt", PROMPT, program=generate.main).out
    for words in (("-q", "-p", PROMPT), ("generate", PROMPT, "-n8")):
        assert run(*words)[:2] == (0, wanted)


@pytest.mark.parametrize("words", ["servr serve", "Genrate generate"])
def test_the_name_of_a_program_misspelled_is_answered_by_the_nearest(run, words):
    word, name = words.split()
    done = run(word, "--model", "x", model=None)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"there is no program {word}; did you mean {name}?" in done.err


def test_nothing_at_a_terminal_is_answered_by_help(run, monkeypatch):
    assert run("help", model=None) == run("-h", model=None) == (0, command.HELP, "")
    monkeypatch.setattr(inputs, "is_piped", lambda: False)
    for words, model in (((), None), (("-n", "9"), "x")):  # no terminal, no pipe, no text
        done = run(*words, model=model)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "there is no text" in done.err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert run(model=None) == (0, command.HELP, "")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    monkeypatch.setattr(generate, "main", lambda argv: sys.exit(7))
    assert run(model=None).code == 7


HEAVY = {"argparse", "json", "logging", "typing", "dataclasses", "threading", "torch", "numpy"}
"""Of these none is imported before Ctrl-C is guarded; each would take milliseconds at least."""


@pytest.mark.parametrize(
    ("flag", "wanted"), [("--version", f"minitri {minitri.__version__}\n"), ("-h", command.HELP)]
)
def test_help_and_version_import_next_to_nothing(flag, wanted):
    """With `-S -E` nothing else has imported it before."""
    program = "import sys, atexit; from minitri.__main__ import main\n"
    program += "atexit.register(lambda: print(*sys.modules)); main([sys.argv[1]])"
    shown = subprocess.check_output([sys.executable, "-SEc", program, flag], text=True)
    text, _, loaded = shown[:-1].rpartition("\n")
    assert f"{text}\n" == wanted
    assert not HEAVY & {*loaded.split()}


QUICK = """
generate --help | 0
generate --list-models | 0
generate --version | 0
generate --warp | 2
generate -p x --system Short! | 2
generate -p x --budget 30 | 2
generate -p x --temperature -1 | 2
generate --dtype int8 | 2
chat --help | 0
chat --chunk-size 7 --budget 30 | 2
serve --help | 0
serve --port 70000 | 2
serve --tree 4x --method naive | 2
plan --help | 0
plan --gpus 0 | 2
plan --model lama2 | 2
bench --help | 0
bench --method naives | 2
selftest --help | 0
selftest --num-samples many | 2
selftest --top-p 2 | 2
audit --help | 0
audit | 2
audit http://127.0.0.1:9 --num-tokens 0 | 2
"""


@pytest.mark.parametrize("line", QUICK.strip().splitlines())
def test_help_and_wrong_flags_are_answered_without_pytorch(line):
    words, code = line.split(" | ")
    program = "import sys, atexit; from minitri.__main__ import main\n"
    program += "atexit.register(lambda: print('\\n', *sys.modules)); main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == int(code), done.stderr
    assert done.stderr.count("\n") == (code == "2")
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not loaded & {"torch", "numpy", "gguf", "huggingface_hub", "jinja2", "uvicorn"}


@pytest.mark.parametrize("words", [(), (PROMPT,)])
def test_a_pipe_is_the_prompt_unless_one_is_given(run, monkeypatch, tmp_path, words):
    wanted = run(PROMPT).out
    (tmp_path / "piped").write_text(PROMPT)
    with (tmp_path / "piped").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(inputs, "is_piped", lambda: True)
        done = run(*words)
        assert done[:2] == (0, wanted)
        assert ("tokens of standard input; greedy" in done.err) == (not words)
        assert stdin.read() == ("" if not words else PROMPT)


def encoded(engine, text: str, **flags) -> list[int]:
    args = SimpleNamespace(**{"max_prompt_tokens": None, **flags})
    return inputs.encode(text, engine, args, num_new=8)


def test_the_first_tokens_of_a_prompt_are_kept_and_it_is_told(engine, run, run_lines):
    text = " ".join(f"{PROMPT} {n}." for n in range(100))
    flags = ("--max-prompt-tokens", "20")
    assert encoded(engine, text, max_prompt_tokens=20) == engine.tokenizer.encode(text)[:20]
    done = run(text, *flags, "--json", "-v")
    assert (done.code, done.json["num_prompt_tokens"]) == (0, 20)
    assert "prompt: only its first 20 tokens" in done.err
    assert run_lines({"prompt": text}, flags=flags).json["num_prompt_tokens"] == 20


def test_a_message_is_put_into_the_template_and_only_it_is_cut(run, run_lines, engine, monkeypatch):
    def encode_chat(tokenizer, messages):
        text = "".join(f"<s>{it['role']}\n{it['content']}</s>" for it in messages)
        return tokenizer.encode(f"{text}<s>assistant\n")

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat, raising=False)
    messages = [{"role": "system", "content": "Short!"}, {"role": "user", "content": PROMPT}]
    whole, flags = encode_chat(engine.tokenizer, messages), ("--chat", "--system", "Short!")
    assert encoded(engine, PROMPT, chat=True, system="Short!") == whole
    for done in (run_lines({"prompt": PROMPT}, flags=flags), run(PROMPT, *flags, "--json")):
        assert done.json["num_prompt_tokens"] == len(whole)
    text = f"{PROMPT}. " * 100
    cut = encoded(engine, text, chat=True, system="Short!", max_prompt_tokens=300)
    assert len(cut) == 300
    told = engine.tokenizer.decode(cut)
    assert told.startswith(f"system\nShort!user\n{text[:200]}")
    assert told.endswith("assistant\n")


def test_log_probabilities_are_in_all_json(run, run_lines):
    flags = ("--logprobs", "2", "--temperature", "0")
    done = run(PROMPT, *flags, "--json"), run_lines({"prompt": PROMPT}, flags=flags)
    assert run(PROMPT, *flags).out == run(PROMPT).out
    for answer in (it.json for it in done):
        likeliest = answer["top_logprobs"]
        assert [pairs[0][1] for pairs in likeliest] == answer["logprobs"]  # greedy: the likeliest
        assert [pairs[0][0] for pairs in likeliest] == answer["token_ids"]
        assert all(len(pairs) == 2 and pairs[1][1] <= pairs[0][1] < 0 for pairs in likeliest)


def test_a_mistake_elsewhere_is_no_bad_input():
    with pytest.raises(ValueError, match="a bug"), exits.clean_exits():
        raise ValueError("a bug")


@pytest.fixture
def advised(folder, tmp_path):
    """A copy of the tiny model whose generation_config.json says this."""

    def write(**settings):
        model = tmp_path / "advised"
        shutil.copytree(folder, model, dirs_exist_ok=True)
        edit_json(model / "generation_config.json", do_sample=True, **settings)
        return model

    return write


def test_sampling_is_as_the_model_says_where_no_flag_does(run, run_lines, advised):
    model = advised(temperature=0.6, top_p=0.9)
    flags = (PROMPT, "--seed", "4", "--json")
    done = run(*flags, model=model)
    assert (done.code, done.json["temperature"]) == (0, 0.6)
    assert "; temperature 0.6, top_p 0.9, seed 4\n" in run(*flags, model=model).err
    sampled = run(*flags, "--temperature", "0.6", "--top-p", "0.9").json["token_ids"]
    greedy = run(*flags).json["token_ids"]
    assert done.json["token_ids"] == sampled
    done = run(*flags, "--temperature", "0", model=model)
    assert done.json["token_ids"] == greedy
    assert "; greedy" in done.err
    assert "; temperature 2.0, top_p 0.9" in run(*flags, "--temperature", "2", model=model).err
    asked = {"prompt": PROMPT}, {"prompt": PROMPT, "temperature": 0}, {"prompt": "x", "seed": 3}
    done = run_lines(*asked, flags=("--seed", "4"), model=model)
    assert [done.lines[n]["token_ids"] for n in (1, 2)] == [sampled, greedy]
    done = run_lines(*asked, model=model)
    [drawn] = re.findall(r"; 3 prompts; .*, seed (\d+)$", done.err, re.MULTILINE)
    assert [done.lines[n]["seed"] for n in (1, 3)] == [int(drawn), 3]
    assert not any("seed " in run(PROMPT, *flags).err for flags in ((), ("--seed", "5")))


@pytest.mark.parametrize("settings", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}])
def test_malformed_advice_warns_and_is_not_followed(run, advised, settings):
    done = run(PROMPT, "--json", model=advised(**settings))
    assert (done.code, done.json["temperature"]) == (0, 0)
    assert f"generation_config.json is not followed: {next(iter(settings))} is " in done.err


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, check=False, text=True, capture_output=True)


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 2, "No space left on device"),
        ("1</dev/null", 2, "Bad file descriptor"),
    ],
)
def test_closed_and_full_streams_are_at_most_one_line(streams, code, said):
    done = shell(f"{sys.executable} -m minitri plan --gpu-memory 999 {streams}")
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(said))
    assert said in done.stderr


def test_a_reader_that_leaves_is_no_error():
    done = shell(f"{{ sleep 0.1; {sys.executable} -m minitri plan; echo $? >&2; }} | true")
    assert done.stderr == "0\n"


def test_a_folder_that_has_gone_is_one_line(tmp_path):
    search = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))  # noqa: PTH109
    program = f"PYTHONPATH={search} {sys.executable} -m minitri plan"
    done = shell(f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; {program}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_names_of_the_package_are_imported_when_they_are_asked_for():
    import minitri

    assert set(minitri.__all__) <= set(dir(minitri))
    assert all(getattr(minitri, name) is not None for name in minitri.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        minitri.Lama  # noqa: B018


@pytest.mark.parametrize("from_stdin", [False, True])
@pytest.mark.parametrize("content", [b"caf\xff", b"ab\0", b"a" * 65, b""])
def test_files_that_are_no_prompt_are_refused(tmp_path, monkeypatch, content, from_stdin):
    file = tmp_path / "prompt"
    file.write_bytes(content)
    monkeypatch.setattr(inputs, "MAX_PROMPT_BYTES", 64)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    with pytest.raises(InputError):
        inputs.read_prompt("-" if from_stdin else str(file))
    with pytest.raises(InputError, match="/dev/zero"):  # which has no end
        inputs.read_prompt("/dev/zero")


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"MINITRI_KERNELS": "off"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_waiting_threads_of_pytorch_sleep_next_to_compiled_kernels(given, found, monkeypatch):
    """Unless there are none, or somebody has decided otherwise."""
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr("shutil.which", lambda _: "c++")
    import_pytorch()
    assert os.environ.get("GOMP_SPINCOUNT") == found
