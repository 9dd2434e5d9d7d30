"""The command line as a user meets it: what goes to which stream; exit codes; `--prompts`."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from minitri.apps.cli import inputs, terminal

PROMPT = "She had been forced into prudence in her youth"
JSON_KEYS = """model method text token_ids num_prompt_tokens num_generated_tokens finish_reason seed
temperature dtype device prefill_seconds decode_seconds ms_per_token tokens_per_second levels"""


def test_text_goes_to_stdout_and_everything_else_to_stderr(run):
    code, out, err = run(PROMPT)
    first, last = err.splitlines()
    assert re.fullmatch(r"tiny, \d+ MB of weights, float32 .*; prompt: \d+ tokens; greedy", first)
    assert re.search("tokens/s; .*% ", last)
    assert run(PROMPT, "--verbose").err.count("\n") > 3
    assert (code, run(PROMPT, "--quiet")) == (0, (0, out, ""))


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
    monkeypatch.setattr(inputs, "is_piped", lambda: True)
    french = "Il était une fois un garçon très gentil, à côté de la forêt."
    (tmp_path / "french.txt").write_text(french, "cp1252")
    done = run("--prompt-file", str(tmp_path / "french.txt"))
    assert done.out == run("--prompt", french).out
    assert run("--prompt-file", str(file)).out == wanted
    for flags in (("--prompt-file", "-"), ()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        done = run(*flags)
        assert (done.out, "tokens of standard input; greedy" in done.err) == (wanted, True)
    done = run(PROMPT, "--max-prompt-tokens", "3", "--json", "-v")
    assert (done.json["num_prompt_tokens"], "only its first 3 of" in done.err) == (3, True)
    monkeypatch.setattr(inputs, "DEMO_PROMPT_TOKENS", 100)
    monkeypatch.setattr(inputs, "is_piped", lambda: False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for flags in (("--demo",), ("--quiet",)):
        assert run(*flags, "--json").json["num_prompt_tokens"] == 100


def test_a_prompt_that_takes_minutes_is_announced_after_its_first_chunk(run, monkeypatch):
    flags = (PROMPT * 20, "--prefill-chunk", "64")
    assert "minutes" not in run(*flags).err
    monkeypatch.setattr(terminal, "SLOW", 1e-9)
    assert run(*flags).err.count("minutes") == 1


IGNORED = """
autoregressive --num-sink-tokens 9 --gamma1 3 | --gamma1 --num-sink-tokens
triforce --draft ngram --gamma1 3 --gamma2 3 --budget 64 --num-sink-tokens 9 |
"""


@pytest.mark.parametrize("line", IGNORED.strip().splitlines())
def test_flags_that_the_method_has_no_use_for_warn_and_run(run, line):
    flags, ignored = line.split("|")
    code, out, err = run(PROMPT, "--method", *flags.split())
    assert (code, out) == (0, run(PROMPT).out)
    warnings = [line for line in err.splitlines() if "has no use for it" in line]
    assert [line.split()[0] for line in warnings] == ignored.split()


def test_colored_text_is_the_plain_text_in_color(run):
    flags = (PROMPT, "-n", "24", "--method", "triforce", "--budget", "8")
    plain, colored = run(*flags), run(*flags, "--color")
    assert "\x1b" not in plain.out + plain.err
    assert "\x1b" in colored.out
    assert re.sub(r"\x1b\[\d*m", "", colored.out) == plain.out
    assert "guessed by the drafter" in colored.err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_ctrl_c_prints_the_statistics_so_far_and_exits_130(run, interrupt, flags):
    interrupt(9)
    code, out, err = run(PROMPT, "-n", "400", *flags)
    assert code == 130
    assert re.search(r"^\d+ tokens in .* decoded at [\d.]+ tokens/s", err, re.MULTILINE)
    assert out.strip()
    if flags:
        assert json.loads(out)["finish_reason"] == "interrupted"
        assert 0 < json.loads(out)["num_generated_tokens"] < 400


def test_ctrl_c_leaves_every_finished_text_written(run_lines, interrupt):
    interrupt(25)  # a text has about 10
    done = run_lines(*[{"prompt": "The sea"}] * 5, flags=("--batch-size", "1"))
    assert (done.code, len(done.lines)) == (130, 2)


@pytest.mark.parametrize(
    ("words", "module"), [("minitri.generate", "torch"), ("minitri", "argparse")]
)
def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path, words, module):
    """Although extension modules may lose exceptions; then the program would go on."""
    source = "import contextlib, signal\n"
    if module == "torch":
        source += "with contextlib.suppress(BaseException): "
    (tmp_path / f"{module}.py").write_text(source + "signal.raise_signal(signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  # a shell may not
    options = {"cwd": tmp_path, "env": environment, "preexec_fn": heed, "capture_output": True}
    done = subprocess.run([sys.executable, "-m", words, "x"], check=False, **options)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"minitri: interrupted\n")


def test_every_line_gets_what_it_gets_alone(run_lines, engine):
    first, second, third = asked = [
        {"prompt": "She had been", "ignore_eos": False},
        {"prompt": "Whoever", "temperature": 0.9, "top_k": 8, "seed": 3, "max_new_tokens": 4},
        {"prompt": "The sea", "stop": ["e"]},
    ]
    flags = ("--batch-size", "2", "--temperature", "0.5", "--seed", "10", "--method", "naive")
    done = run_lines(first | {"id": "日\u2028\ud800"}, second, "", third | {"id": [1]}, flags=flags)
    assert (done.code, "decoded at" in done.err) == (0, True)
    seeds = {str(answer["id"]): answer["seed"] for answer in done.lines.values()}
    assert seeds == {"日\u2028\ud800": 10, "2": 3, "[1]": 12}
    assert '{"id": "日\\u2028\\ud800", ' in done.out
    common = {"method": "naive", "max_new_tokens": 8, "ignore_eos": True, "temperature": 0.5}
    for (_, answer), settings in zip(sorted(done.lines.items()), asked, strict=True):
        settings = common | {"seed": answer["seed"]} | settings
        wanted = engine.complete(settings.pop("prompt"), **settings)
        assert tuple(answer["token_ids"]) == wanted.token_ids
        assert (answer["text"], answer["finish_reason"]) == (wanted.text, wanted.finish_reason)


WRONG = [
    ("nonsense", "line 2 is no JSON object with a text as prompt (Expecting value"),
    ("[" * 100_000, "line 3 is no JSON"),
    ({"text": "x"}, "text is not a setting"),
    ({"prompt": "word " * 5000}, "prompt has"),
]


def test_wrong_lines_are_named_and_the_others_run(run_lines):
    lines = [line for line, _ in WRONG]
    sea = '{"prompt": "The sea\u2028"}'  # which is no end of a line
    code, _, err = done = run_lines(sea, *lines, {"prompt": "She"})
    assert code == 2
    for number, (_, message) in enumerate(WRONG, 2):
        assert message in done.lines[number]["error"]
    assert f"{len(WRONG)} of {len(WRONG) + 2} lines" in err.splitlines()[-1]
    assert all(done.lines[number]["text"] for number in (1, len(WRONG) + 2))
    assert run_lines("", " ").code == 2  # without a prompt


def test_several_texts_of_one_prompt_are_those_of_their_seeds(run):
    """Written one after the other, in JSON a line each."""
    flags = (PROMPT, "--temperature", "1", "--coupled")
    alone = [run(*flags, "--seed", str(3 + i)).out for i in range(4)]
    done = run(*flags, "--seed", "3", "--n", "4")
    order = [int(text) - 1 for text in re.findall(r"text (\d) of 4, seed \d:", done.err)]
    assert (done.code, sorted(order)) == (0, [0, 1, 2, 3])
    assert done.out == "".join(alone[index] for index in order)
    lines = run(*flags, "--seed", "3", "--n", "4", "--json").out.splitlines()
    texts = {answer["index"]: answer["text"] + "\n" for answer in map(json.loads, lines)}
    assert texts == dict(enumerate(alone))


def test_a_saved_kv_cache_is_not_computed_again(run, tmp_path):
    file = str(tmp_path / "kv")
    done = run(PROMPT, "--save-kv", file)
    assert "saved the KV cache of" in done.err
    again = run(PROMPT, "--load-kv", file)
    assert again.out == done.out
    size = re.search(r"begin with up to (\d+) of its \1 tokens", again.err)[1]
    assert f"begin with up to 0 of its {size} tokens" in run("Else", "--load-kv", file).err
    first, second = (re.search(r"for (\d+) tokens of", text.err)[1] for text in (done, again))
    assert int(second) < int(first)


def test_log_probabilities_are_in_all_json(run, run_lines):
    flags = ("--logprobs", "2", "--temperature", "0")
    for done in (run(PROMPT, *flags, "--json"), run_lines({"prompt": PROMPT}, flags=flags)):
        likeliest = done.json["top_logprobs"]  # greedy: the first one is taken
        assert [pairs[0][1] for pairs in likeliest] == done.json["logprobs"]
        assert [pairs[0][0] for pairs in likeliest] == done.json["token_ids"]
        assert all(len(pairs) == 2 and pairs[1][1] <= pairs[0][1] < 0 for pairs in likeliest)


def test_flags_for_grammars_are_one_setting(run, tmp_path):
    """A text that a grammar ends is whole, whatever else its flags say."""
    lark, schema = tmp_path / "answer.lark", tmp_path / "schema.json"
    lark.write_text('start: "yes" | "no" " sir"?')
    schema.write_text('{"enum": [17, "x"]}')
    for flags, wanted in (
        (("--grammar", lark), {"yes", "no", "no sir"}),
        (("--json-schema", schema), {"17", '"x"'}),
        (("--json-schema", schema.read_text()), {"17", '"x"'}),
        (("--regex", "a{3}b?"), {"aaa", "aaab"}),
    ):
        done = run(PROMPT, *map(str, flags), "--json", "-n", "60", "--temperature", "1")
        assert done.json["text"] in wanted


def test_a_text_is_scored_token_by_token(run, folder, engine, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(PROMPT, encoding="utf-8")
    words = ("score", str(file), "-m", str(folder), "--dtype", "float32")
    scores = engine.score(PROMPT)
    report = run(*words, "--json", model=None).json
    assert report["logprobs"] == [None, *scores.tolist()]
    assert report["perplexity"] == pytest.approx((-scores.mean()).exp().item())
    assert f"{scores.mean():.4f} nats per token" in run(*words, model=None).out
    assert run("score", str(tmp_path), *words[2:], model=None).code == 2
