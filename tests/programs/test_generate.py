"""The command line as a user meets it: what goes to which stream, exit codes, and one line for
every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.cli import inputs
from minitri.generate import main
from tools.bench import floor

JSON_KEYS = {
    "model", "method", "text", "token_ids", "num_prompt_tokens", "num_generated_tokens",
    "finish_reason", "seed",
    "temperature", "dtype", "device", "prefill_seconds", "decode_seconds", "ms_per_token",
    "tokens_per_second",
    "levels",
}  # fmt: skip


@pytest.fixture
def cli(folder, capsys):
    """Runs the command on the tiny model; gives exit code, standard output and standard error."""

    def run(*flags: str, model: str = str(folder)):
        with pytest.raises(SystemExit) as ended:
            main(["--model", model, "--dtype", "float32", "--max-new-tokens", "8", *flags])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_text_goes_to_stdout_and_everything_else_to_stderr(cli):
    code, out, err = cli("--prompt", "She had been", "--ignore-eos", "--stats")
    assert code == 0
    assert "prefill" not in out
    for word in ("weights: ", "prefill", "decode", "ms/token", "KV cache"):
        assert word in err


def test_json_is_the_only_line_and_has_every_key(cli):
    code, out, _ = cli(
        "--prompt", "She had been", "--json", "--seed", "3", "--temperature", "0.5", "--ignore-eos"
    )
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert set(report) >= JSON_KEYS
    assert (report["seed"], report["temperature"], report["dtype"]) == (3, 0.5, "float32")
    assert report["num_generated_tokens"] == len(report["token_ids"]) == 8
    assert report["finish_reason"] == "length"


def test_streamed_text_is_the_text_of_the_report(cli):
    flags = ("--prompt", "Naïve 日本", "--temperature", "1", "--seed", "3", "--ignore-eos",
        "--max-new-tokens",
             "40")  # fmt: skip
    assert cli(*flags)[1] == json.loads(cli(*flags, "--json")[1])["text"] + "\n"


def test_quiet_says_nothing_on_stderr(cli):
    assert cli("--prompt", "x", "--quiet")[2] == ""


def test_prompts_come_from_files_stdin_and_the_demo(cli, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("She had been forced", encoding="utf-8")
    from_file = json.loads(cli("--prompt-file", str(file), "--json")[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert json.loads(cli("--prompt-file", "-", "--json")[1])["token_ids"] == from_file["token_ids"]
    assert (
        json.loads(cli("--prompt", "She had been forced", "--json")[1])["token_ids"]
        == from_file["token_ids"]
    )
    monkeypatch.setattr(inputs, "DEMO_PROMPT_TOKENS", 100)
    for flags in (("--demo",), ()):
        code, out, err = cli(*flags, "--json")
        assert (code, json.loads(out)["num_prompt_tokens"]) == (0, 100)
        assert "first 100 tokens of --demo" in err


def test_max_prompt_tokens_keeps_the_first(cli):
    whole = json.loads(
        cli("--prompt", "She had been forced into prudence", "--max-prompt-tokens", "3", "--json")[
            1
        ]
    )
    assert whole["num_prompt_tokens"] == 3


def test_stop_strings_and_rope_scaling_reach_the_engine(cli):
    free = json.loads(cli("--prompt", "She had", "--ignore-eos", "--json")[1])
    stop = free["text"][2:4]
    cut = json.loads(
        cli("--prompt", "She had", "--ignore-eos", "--json", "--stop", "never", "--stop", stop)[1]
    )
    assert (cut["finish_reason"], cut["text"]) == ("stop", free["text"][: free["text"].find(stop)])
    assert "yarn x2" in cli("--prompt", "x", "--rope-scaling", "yarn:2")[2]


def test_every_flag_reaches_the_engine(cli, monkeypatch):
    seen = {}
    generate_in_engine = Engine.generate

    def spy(self, prompts, **settings):
        seen.update(settings)
        return generate_in_engine(self, prompts, **settings)

    monkeypatch.setattr(Engine, "generate", spy)
    cli("--prompt", "x", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.1",
        "--seed", "4", "--max-new-tokens", "7", "--prefill-chunk", "3", "--no-cuda-graphs",
        "--stop", "a", "--stop", "b", "--ignore-eos", "--method", "triforce", "--draft", "ngram",
        "--gamma1", "3", "--gamma2", "5", "--budget", "32", "--chunk-size", "4",
        "--num-sink-tokens", "2", "--num-recent-tokens", "9", "--observation-window", "6",
        "--rebuild-stride", "11", "--rebuild-threshold", "0.5", "--coupled",
        "--verification", "token", "--tree", "2x3")  # fmt: skip
    assert seen == {
        "sampling": SamplingParams(0.5, 9, 0.8, 0.1),
        "generation": GenerationConfig(7, ("a", "b"), True, prefill_chunk=3, cuda_graphs=False),
        "speculation": SpeculationConfig(
            "triforce",
            "retrieval",
            3,
            5,
            32,
            4,
            2,
            9,
            6,
            11,
            0.5,
            True,
            verification="token",
            tree="2x3",
        ),
        "seed": 4,
    }


BAD_FLAGS = {
    "unknown model": (["--prompt", "x"], "no-such-model", "unknown model 'no-such-model'"),
    "close to a name": (["--prompt", "x"], "smollm2-135", "did you mean smollm2-135m?"),
    "empty prompt": (["--prompt", ""], None, "the prompt is empty"),
    "prompt beyond the context": (
        ["--prompt", "word " * 600], None, "holds 512 minus max_new_tokens=8",
    ),
    "no such prompt file": (
        ["--prompt-file", "/nowhere/x.txt"], None, "cannot read the prompt from /nowhere/x.txt",
    ),
    "a folder as prompt file": (["--prompt-file", "/"], None, "cannot read the prompt"),
    "negative temperature": (
        ["--prompt", "x", "--temperature", "-1"], None, "temperature is -1.0; it must be",
    ),
    "temperature nan": (["--prompt", "x", "--temperature", "nan"], None, "temperature is nan"),
    "top-p 0": (["--prompt", "x", "--top-p", "0"], None, "top_p is 0.0"),
    "top-k -3": (["--prompt", "x", "--top-k", "-3"], None, "top_k is -3"),
    "min-p 7": (["--prompt", "x", "--min-p", "7"], None, "min_p is 7"),
    "no new tokens": (["--prompt", "x", "--max-new-tokens", "0"], None, "max_new_tokens is 0"),
    "not a number": (
        ["--prompt", "x", "--max-new-tokens", "many"], None, "'many' is not a whole number",
    ),
    "max prompt tokens 0": (
        ["--prompt", "x", "--max-prompt-tokens", "0"], None, "'0' is not a whole number",
    ),
    "negative seed": (["--prompt", "x", "--seed", "-1"], None, "'-1' is not a whole number from 0"),
    "a count of 23 digits": (
        ["--prompt", "x", "--observation-window", "9" * 23], None, "is not a whole number of at",
    ),
    "a count of 5,000 digits": (
        ["--prompt", "x", "--budget", "9" * 5000], None, "argument --budget: '99999999",
    ),
    "full-width digits": (
        ["--prompt", "x", "--top-k", "１２"], None, "--top-k: '１２' is not a whole number",
    ),
    "underscores in digits": (
        ["--prompt", "x", "--max-prompt-tokens", "1_000"], None, "'1_000' is not a whole number",
    ),
    "empty stop": (["--prompt", "x", "--stop", ""], None, "a stop string is empty"),
    "prompt that is not UTF-8": (
        ["--prompt", "a\udcff"], None, "the prompt is not valid Unicode (character 1)",
    ),
    "stop that is not UTF-8": (
        ["--prompt", "x", "--stop", "\udcff"], None, "a stop string is not valid Unicode",
    ),
    "offload without a GPU": (
        ["--prompt", "x", "--device", "cpu", "--offload"], None, "offload is for GPUs",
    ),
    "a GPU's attention": (
        ["--prompt", "x", "--device", "cpu", "--attention", "math"], None, "math is for GPUs",
    ),
    "on-chip alone": (
        ["--prompt", "x", "--on-chip", "2"], None,
        "on_chip is 2, which means nothing without offload",
    ),
    "two prompts": (["--prompt", "x", "--demo"], None, "not allowed with argument"),
    "unknown flag": (["--prompt", "x", "--warp"], None, "unrecognized arguments: --warp"),
    "unknown method": (["--prompt", "x", "--method", "magic"], None, "invalid choice: 'magic'"),
    "unknown dtype": (["--prompt", "x", "--dtype", "int1"], None, "invalid choice: 'int1'"),
    "unknown device": (["--prompt", "x", "--device", "abacus"], None, "device 'abacus' is unknown"),
    "bad scaling": (["--prompt", "x", "--rope-scaling", "yarn"], None, "is not KIND:FACTOR"),
    "budget that is no multiple": (
        ["--prompt", "x", "--method", "retrieval", "--budget", "30"], None,
        "budget is 30 tokens; it must be a multiple of the chunk size, 8, such as 32",
    ),
    "budget 0": (
        ["--prompt", "x", "--method", "retrieval", "--budget", "0"], None, "budget is 0 tokens",
    ),
    "gamma1 0": (
        ["--prompt", "x", "--method", "triforce", "--gamma1", "0"], None, "gamma1 is 0; it must be",
    ),
    "gamma2 0": (
        ["--prompt", "x", "--method", "triforce", "--gamma2", "0"], None, "gamma2 is 0; it must be",
    ),
    "gamma2 100": (
        ["--prompt", "x", "--method", "triforce", "--gamma2", "100"], None,
        "gamma1, gamma2 are auto, 100",
    ),
    "chunk size 0": (
        ["--prompt", "x", "--method", "retrieval", "--chunk-size", "0"], None, "chunk_size is 0",
    ),
    "negative sinks": (
        ["--prompt", "x", "--method", "naive", "--num-sink-tokens", "-1"], None,
        "num_sink_tokens is",
    ),
    "threshold 2": (
        ["--prompt", "x", "--method", "triforce", "--rebuild-threshold", "2"], None,
        "rebuild_threshold",
    ),
    "triforce without drafter": (
        ["--prompt", "x", "--method", "triforce", "--draft", "none"], None,
        "--method triforce needs a drafter, got --draft none; use --method retrieval",
    ),
    "naive without drafter": (
        ["--prompt", "x", "--method", "naive", "--draft", "none"], None, "needs a drafter",
    ),
    "unknown drafter": (
        ["--prompt", "x", "--method", "naive", "--draft", "no-such"], None,
        "unknown model 'no-such'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_input_is_one_line_and_exit_code_2(cli, case):
    flags, model, message = BAD_FLAGS[case]
    code, out, err = cli(*flags, **({"model": model} if model else {}))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("minitri: ")
    assert message in last
    assert "Traceback" not in err


def test_a_prompt_that_is_not_utf8_names_the_byte(cli, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes("café".encode("latin-1"))
    code, out, err = cli("--prompt-file", str(file))
    assert (code, out) == (2, "")
    assert re.search(r"latin1.txt is not UTF-8 text \(byte 3\); convert it", err)


SPECULATION = (
    "--prompt",
    "She had been forced into prudence in her youth",
    "--ignore-eos",
    "--max-new-tokens",
    "24",
)


def test_a_drafter_of_another_vocabulary_is_refused_in_one_line(cli, folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    pipeline = json.loads((other / "tokenizer.json").read_text())
    vocab = pipeline["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(pipeline))
    code, out, err = cli(*SPECULATION, "--method", "triforce", "--draft", str(other))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("minitri: the drafter ")
    assert re.search(
        r" has another vocabulary: its token \d+ is 'b', the target's is 'a'; use a drafter ", last
    )
    assert (
        cli(
            *SPECULATION,
            "--method",
            "triforce",
            "--draft",
            str(folder),
            "--num-recent-tokens",
            "50",
        )[0]
        == 0
    )


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        (["--method", "autoregressive", "--gamma1", "3"], ["--gamma1"]),
        (["--method", "retrieval", "--draft", "ngram", "--gamma1", "3"], ["--draft", "--gamma1"]),
        (["--method", "naive", "--draft", "ngram", "--budget", "64", "--gamma2", "3"], ["--gamma2",
        "--budget"]),
        (["--method", "autoregressive", "--chunk-size", "4"], ["--chunk-size"]),
        (["--method", "naive", "--rebuild-stride", "9", "--rebuild-threshold", "0.5"],
         ["--rebuild-stride", "--rebuild-threshold"]),
        (["--method", "autoregressive", "--num-sink-tokens", "9", "--num-recent-tokens", "9"],
         ["--num-sink-tokens", "--num-recent-tokens"]),
        (["--gamma1", "3", "--budget", "64", "--num-recent-tokens", "40"], []),
        (["--method", "naive", "--draft", "ngram", "--num-recent-tokens", "9"],
        ["--num-recent-tokens"]),
        (["--method", "triforce", "--draft", "ngram", "--gamma1", "3", "--gamma2", "3", "--budget",
        "64", "--num-sink-tokens", "9", "--num-recent-tokens", "9"], []),
        (["--method", "retrieval", "--draft", "none", "--num-sink-tokens", "9"], []),
    ],
)  # fmt: skip
def test_flags_that_the_method_has_no_use_for_warn_and_run(cli, flags, ignored):
    code, out, err = cli(*SPECULATION, *flags)
    assert (code, out) == (0, cli(*SPECULATION)[1])
    warnings = [line for line in err.splitlines() if "is ignored" in line]
    assert [line.split()[0] for line in warnings] == ignored
    assert all("has no use for it" in line for line in warnings)


@pytest.mark.parametrize("method", ["retrieval", "triforce"])
def test_a_budget_larger_than_the_text_works(cli, method):
    plain = json.loads(cli(*SPECULATION, "--json")[1])
    flags = ("--method", method, "--draft", "auto", "--draft-weights", "same", "--budget", "4096")
    report = json.loads(cli(*SPECULATION, "--json", *flags)[1])
    assert report["token_ids"] == plain["token_ids"]
    assert report["levels"][-1]["acceptance_rate"] == 1


def test_coupled_draws_give_one_text_per_seed_whatever_the_method(cli):
    flags = (*SPECULATION, "--temperature", "0.8", "--coupled")
    plain = cli(*flags, "--seed", "5")[1]
    assert cli(*flags, "--seed", "6")[1] != plain
    for method in ("naive", "retrieval", "triforce"):
        assert cli(*flags, "--seed", "5", "--method", method, "--budget", "8")[1] == plain
    assert cli(*flags, "--seed", "5", "--method", "triforce", "--draft", "ngram")[1] == plain


@pytest.mark.parametrize("method", ["autoregressive", "triforce"])
def test_colored_text_is_the_plain_text_in_color(cli, method):
    flags = (*SPECULATION, "--method", method, "--budget", "8")
    _, plain, plain_err = cli(*flags)
    _, colored, err = cli(*flags, "--color")
    assert "\x1b" not in plain + plain_err
    assert "\x1b" in colored
    assert re.sub(r"\x1b\[\d*m", "", colored) == plain
    assert "guessed by the drafter" in err
    assert "\x1b" not in cli(*flags, "--color", "--quiet")[2]


def start(folder, *flags: str, **options) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "minitri.generate",
        "--model",
        str(folder),
        "--prompt",
        "She had",
        *flags,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, preexec_fn=heed_ctrl_c, **options)


def heed_ctrl_c() -> None:
    """A shell starts background jobs deaf to Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_the_statistics_so_far_and_exits_130(folder, as_json):
    """The run would take many minutes; the signal comes while tokens stream, or a second after
    work began."""
    flags = ["--rope-scaling", "linear:1000", "--max-new-tokens", "400000", "--ignore-eos"]
    process = start(folder, *flags, *["--json"] * as_json)
    assert process.stderr is not None
    assert process.stdout is not None
    while "context" not in process.stderr.readline():  # the last line of the log before work begins
        pass
    first = "" if as_json else process.stdout.read(1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert re.search(r"^\d+ tokens in .* decoded at [\d.]+ tokens/s", err, re.MULTILINE)
    if as_json:
        assert json.loads(out)["finish_reason"] == "interrupted"
        assert json.loads(out)["text"]
    else:
        assert first + out.rstrip()


@pytest.mark.parametrize(
    "words", ["minitri.generate --help", "minitri.bench --help", "minitri She"]
)
def test_ctrl_c_while_pytorch_is_imported_is_one_line(tmp_path, words):
    """Although extension modules may lose exceptions; then the program went on."""
    program = (
        "import contextlib, signal\n"
        "with contextlib.suppress(BaseException):\n"
        "    signal.raise_signal(signal.SIGINT)"
    )
    (tmp_path / "torch.py").write_text(program)
    search = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", *words.split()], capture_output=True, text=True, check=False,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": search}, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "minitri: interrupted\n")


def test_a_reader_that_leaves_is_no_error(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [
        sys.executable,
        "-m",
        "minitri",
        "--model",
        str(folder),
        "--prompt",
        "She had",
    ]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_one_line(folder):
    if not os.path.exists("/dev/full"):  # noqa: PTH110
        pytest.skip("needs /dev/full, which only Linux has")
    command = [
        sys.executable,
        "-m",
        "minitri.generate",
        "--model",
        str(folder),
        "--prompt",
        "She had",
        "--ignore-eos",
    ]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "minitri: cannot write the output: No space left"
    )


@pytest.mark.parametrize(
    "flags", [["--new-tokens", "3"], ["--prompt-tokens", "0"], ["--repeats", "x"]]
)
def test_the_benchmark_refuses_what_it_cannot_measure(capsys, flags):
    from minitri.bench import __main__ as bench

    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_shows_examples_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("examples:", "--rope-scaling", "yarn:4", "default: 256", "llama2-7b-128k"):
        assert word in out


def test_the_benchmark_ends_in_one_json_line(folder, capsys):
    from tools.bench import __main__ as bench

    with pytest.raises(SystemExit) as ended:
        bench.main(["--model", str(folder), "--dtype", "float32", "--prompt-tokens", "40",
            "--new-tokens", "8",
                    "--repeats", "2", "--profile", "--quiet"])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    result = json.loads(lines[-1])
    assert (
        result["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
    )  # K and V, layers, KV heads, head dim, bytes
    assert (
        result["weight_bytes"] - result["weight_bytes_per_token"] == 320 * 64 * 4
    )  # the untied embedding
    assert (
        result["ms_per_token"]["min"]
        <= result["ms_per_token"]["median"]
        <= result["ms_per_token"]["max"]
    )
    assert set(result["profile_ms"]) == {*floor.PARTS, "other"}
