"""The command line as a user meets it: what goes to which stream, exit codes, and one line for
every mistake."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.cli import arguments

PROMPT = "She had been forced into prudence in her youth"
JSON_KEYS = """model method text token_ids num_prompt_tokens num_generated_tokens finish_reason seed
temperature dtype device prefill_seconds decode_seconds ms_per_token tokens_per_second levels"""


def test_text_goes_to_stdout_and_everything_else_to_stderr(run):
    code, out, err = run(PROMPT, "--stats")
    assert code == 0
    assert "prefill" not in out
    for word in ("weights: ", "prefill_seconds", "ms/token", "kv_cache_bytes", "% guessed"):
        assert word in err
    assert run(PROMPT, "--quiet") == (0, out, "")


def test_json_is_the_only_line_and_has_every_key_and_the_streamed_text(run):
    flags = ("Naïve 日本", "--seed", "3", "--temperature", "0.5")
    done = run(*flags, "--json")
    report = done.json
    assert (done.code, done.out.count("\n")) == (0, 1)
    assert set(report) >= {*JSON_KEYS.split()}
    assert (report["seed"], report["temperature"], report["dtype"]) == (3, 0.5, "float32")
    assert report["num_generated_tokens"] == len(report["token_ids"]) == 8
    assert report["finish_reason"] == "length"
    assert run(*flags).out == report["text"] + "\n"


def test_prompts_come_from_files_stdin_and_the_demo(run, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    wanted = run("--prompt", PROMPT).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run("--prompt-file", str(file)).out == run("--prompt-file", "-").out == wanted
    assert run(PROMPT, "--max-prompt-tokens", "3", "--json").json["num_prompt_tokens"] == 3
    monkeypatch.setattr(arguments, "DEMO_PROMPT_TOKENS", 100)
    for flags in (("--demo",), ()):
        assert run(*flags, "--json").json["num_prompt_tokens"] == 100


def test_stop_strings_and_rope_scaling_reach_the_engine(run):
    free = run(PROMPT).out[:-1]
    stop = free[2:4]
    cut = run(PROMPT, "--json", "--stop", "never", "--stop", stop).json
    assert (cut["finish_reason"], cut["text"]) == ("stop", free[: free.find(stop)])
    assert "yarn x2" in run("x", "--rope-scaling", "yarn:2").err


def test_every_flag_reaches_the_engine(run, monkeypatch):
    seen = {}

    def spy(self, prompts, **settings):
        seen.update(settings)
        sys.exit()

    monkeypatch.setattr(Engine, "generate", spy)
    flags = """x --temperature 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --seed 4 --max-new-tokens 7
        --prefill-chunk 3 --no-cuda-graphs --stop a --stop b --ignore-eos --method triforce
        --draft ngram --gamma1 3 --gamma2 5 --budget 32 --chunk-size 4 --num-sink-tokens 2
        --num-recent-tokens 9 --observation-window 6 --rebuild-stride 11
        --coupled --verification token --tree 2x3"""
    run(*flags.split())
    sizes = {"gamma1": 3, "gamma2": 5, "budget": 32, "chunk_size": 4, "observation_window": 6}
    sizes |= {"num_sink_tokens": 2, "num_recent_tokens": 9, "tree": "2x3", "verification": "token"}
    assert seen == {
        "sampling": SamplingParams(0.5, 9, 0.8, 0.1),
        "generation": GenerationConfig(7, ("a", "b"), True, prefill_chunk=3, cuda_graphs=False),
        "speculation": SpeculationConfig("triforce", **sizes, rebuild_stride=11, coupled=True),
        "seed": 4,
    }


IGNORED = """
autoregressive --num-sink-tokens 9 --gamma1 3 | --gamma1 --num-sink-tokens
retrieval --draft ngram --gamma1 3 | --draft --gamma1
naive --draft ngram --budget 64 --rebuild-stride 9 | --budget --rebuild-stride
auto --gamma1 3 --budget 64 --num-recent-tokens 40 |
triforce --draft ngram --gamma1 3 --gamma2 3 --budget 64 --num-sink-tokens 9 |
"""


@pytest.mark.parametrize("line", IGNORED.strip().splitlines())
def test_flags_that_the_method_has_no_use_for_warn_and_run(run, line):
    flags, ignored = line.split("|")
    code, out, err = run(PROMPT, "-n", "24", "--method", *flags.split())
    assert (code, out) == (0, run(PROMPT, "-n", "24").out)
    warnings = [line for line in err.splitlines() if "has no use for it" in line]
    assert [line.split()[0] for line in warnings] == ignored.split()


def test_colored_text_is_the_plain_text_in_color(run):
    flags = (PROMPT, "-n", "24", "--method", "triforce", "--budget", "8")
    plain, colored = run(*flags), run(*flags, "--color")
    assert "\x1b" not in plain.out + plain.err
    assert "\x1b" in colored.out
    assert re.sub(r"\x1b\[\d*m", "", colored.out) == plain.out
    assert "guessed by the drafter" in colored.err


def heed_ctrl_c() -> None:
    """A shell starts background jobs deaf to Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_the_statistics_so_far_and_exits_130(folder, as_json):
    """The run would take many minutes; the signal comes while tokens stream, or a second after
    work began."""
    command = [sys.executable, "-m", "minitri.generate", "--model", str(folder), PROMPT]
    command += ["--rope-scaling", "linear:1000", "--max-new-tokens", "400000", "--ignore-eos"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *["--json"] * as_json], **pipes, preexec_fn=heed_ctrl_c)
    while "context" not in process.stderr.readline():  # the last line of the log before work begins
        pass
    first = "" if as_json else process.stdout.read(1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert re.search(r"^\d+ tokens in .* decoded at [\d.]+ tokens/s", err, re.MULTILINE)
    assert (first + out).strip()
    if as_json:
        assert json.loads(out)["finish_reason"] == "interrupted"
        assert json.loads(out)["text"]


@pytest.mark.parametrize("words", ["minitri.generate --help", "minitri.bench --help", "minitri x"])
def test_ctrl_c_while_pytorch_is_imported_is_one_line(tmp_path, words):
    """Although extension modules may lose exceptions; then the program went on."""
    (tmp_path / "torch.py").write_text(
        "import contextlib, signal\n"
        "with contextlib.suppress(BaseException):\n"
        "    signal.raise_signal(signal.SIGINT)"
    )
    search = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", *words.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": search}
    process = subprocess.Popen(
        command, **pipes, cwd=tmp_path, env=environment, preexec_fn=heed_ctrl_c
    )
    assert process.communicate() == ("", "minitri: interrupted\n")
    assert process.returncode == 130
