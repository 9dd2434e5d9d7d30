"""The command `minitri`, and the habits of command lines that its programs keep."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import minitri
from minitri import Engine, generate, plan
from minitri import __main__ as command
from minitri.bench import __main__ as bench
from minitri.cli import arguments, exits, inputs, report
from minitri.errors import InputError
from minitri.loading.named_models import MODELS
from minitri.loading.tokenizer import Tokenizer
from minitri.roofline import CPU
from minitri.selftest import __main__ as selftest
from minitri.stats import LevelStats, Stats
from tests.conftest import edit_json

PROMPT = "She had been forced into prudence in her youth"


@pytest.fixture
def run(folder, capsys):
    """Runs `minitri` on the tiny model; gives exit code, standard output and standard error."""

    def run(*words: str, model=folder, program=command.main):
        given = ["-m", str(model), "--dtype", "float32", "--ignore-eos"] if model else []
        with pytest.raises(SystemExit) as ended:
            program([*words, *given])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize("program", [generate, plan, bench, selftest])
def test_a_program_is_a_word_of_the_command(run, program):
    name = program.__name__.split(".")[1]
    help_text = run("--help", program=program.main, model=None)
    assert run(name, "--help", model=None) == help_text
    assert f"python -m minitri.{name} " in help_text[1]
    assert name in command.HELP


def test_help_names_the_command_that_was_called(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/minitri"])
    out = run("plan", "--help", model=None)[1]
    assert "minitri plan --model" in out
    assert "python -m" not in out


def test_a_text_goes_on_with_and_without_the_name_of_a_program(run):
    wanted = run("--prompt", PROMPT, "--max-new-tokens", "8", program=generate.main)[1]
    for words in (
        (PROMPT, "-n", "8"),
        ("-n", "8", "-q", "-p", PROMPT),
        ("generate", PROMPT, "-n8"),
    ):
        assert run(*words)[:2] == (0, wanted)
    assert run("-p", "x", "y")[0] == 2


def test_nothing_at_a_terminal_is_answered_by_help(run, monkeypatch):
    for words in ([], ["-h"], ["--help"]):
        assert run(*words, model=None) == (0, command.HELP, "")
    monkeypatch.setattr(command, "is_piped", lambda: True)
    monkeypatch.setattr(generate, "main", lambda argv: sys.exit(7))
    assert run(model=None)[0] == 7


def test_help_and_version_do_not_wait_for_pytorch():
    program = (
        "import sys, atexit; from minitri.__main__ import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'argparse' in sys.modules))\n"
        "main([sys.argv[1]])"
    )
    for flag, wanted in (("--version", f"minitri {minitri.__version__}\n"), ("-h", command.HELP)):
        arguments = [sys.executable, "-S", "-E", "-c", program, flag]
        assert subprocess.check_output(arguments, text=True) == f"{wanted}False False\n"


def test_every_program_says_its_version(run):
    for program in (generate, plan, bench, selftest):
        assert run("--version", program=program.main, model=None)[1].startswith("minitri 0")


def test_the_table_of_models_has_every_name(run):
    code, out, _ = run("--list-models", model=None)
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0
    assert rows == [[name, row.repo, row.draft, str(row.context)] for name, row in MODELS.items()]


def test_a_pipe_is_the_prompt_unless_one_is_given(run, monkeypatch):
    wanted = run(PROMPT, "-n", "4")[1]
    for words, is_read in ((["-n", "4"], True), ([PROMPT, "-n", "4"], False)):
        reading, writing = os.pipe()
        os.write(writing, PROMPT.encode())
        os.close(writing)
        with os.fdopen(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code, out, err = run(*words)
            assert (code, out) == (0, wanted)
            assert ("prompt: standard input" in err) == is_read
            assert stdin.read() == ("" if is_read else PROMPT)


def test_an_empty_pipe_is_refused_and_a_closed_or_null_input_is_none(run, monkeypatch, tmp_path):
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert exits.is_piped()
        assert run("-n", "4")[0] == 2
    assert not exits.is_piped()
    monkeypatch.setattr(sys, "stdin", None)
    assert not exits.is_piped()
    with open(os.devnull) as stdin:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdin", stdin)
        assert not exits.is_piped()


def test_fit_keeps_the_first_or_last_tokens_and_says_so(engine, caplog, run):
    text, config = " ".join(f"{PROMPT} {n}." for n in range(100)), engine.config
    ids, room = engine.tokenizer.encode(text), config.context_length - 8

    def encode(text, fit, most=None):
        args = SimpleNamespace(fit=fit)
        return inputs.encode(text, engine.tokenizer, config, most, 8, args)

    kept = {fit: encode(text, fit) for fit in ("first", "last")}
    assert kept["first"] == ids[:room]
    has_bos = ids[0] == engine.tokenizer.bos_token_id
    assert kept["last"] == ids[:has_bos] + ids[len(ids) - room + has_bos :]
    assert encode(text, "last", 20)[-9:] == ids[-9:]
    assert encode(PROMPT, "last") == (engine.tokenizer.encode(PROMPT))
    code, out, err = run(text, "-n", "8", "--fit", "last", "--json")
    assert (code, json.loads(out)["num_prompt_tokens"]) == (0, room)
    assert f"prompt: only its last {room} tokens, the others do not fit" in err
    assert run(text, "-n", "8")[0] == 2
    for fit in ("first", "last"):
        assert "holds 512 minus max_new_tokens=600" in run(PROMPT, "-n", "600", "--fit", fit)[2]


def test_fit_is_for_each_line_of_a_file_of_prompts(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "x " * 3000}, {"token_ids": [5] * 700}, {"prompt": PROMPT}]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run("--prompts", str(file), "-n", "12", "--fit", "last")
    counts = {line["line"]: line["num_prompt_tokens"] for line in map(json.loads, out.splitlines())}
    assert code == 0
    assert (counts[1], counts[2]) == (500, 500)
    assert counts[3] < 500


def test_ends_that_must_stay_are_not_cut(engine):
    def cut(room, fit, **ends):
        return inputs.cut([*range(20)], engine.config, room, 8, fit, **ends)

    assert cut(8, "first", num_head=2, num_tail=3) == [0, 1, 2, 3, 4, 17, 18, 19]
    assert cut(8, "last", num_head=2, num_tail=3) == [0, 1, 14, 15, 16, 17, 18, 19]
    assert cut(20, "last") == cut(4, "last", num_head=2, num_tail=3) == [*range(20)]


def test_a_message_is_put_into_the_template_and_only_it_is_cut(run, engine, monkeypatch, tmp_path):
    def encode_chat(tokenizer, messages):
        text = "".join(f"<s>{it['role']}\n{it['content']}</s>" for it in messages)
        return tokenizer.encode(f"{text}<s>assistant\n")

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat, raising=False)
    prompts_seen = []
    generate_in_engine = Engine.stream

    def spy(self, requests, **settings):
        prompts_seen.extend(request.prompt for request in requests)
        return generate_in_engine(self, requests, **settings)

    monkeypatch.setattr(Engine, "stream", spy)
    system, tokenizer, config = (
        {"role": "system", "content": "Short!"},
        engine.tokenizer,
        engine.config,
    )
    flags, user = ("--chat", "--system", "Short!", "-n", "8"), {"role": "user", "content": PROMPT}
    whole = encode_chat(tokenizer, [system, user])
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}))
    assert run("--prompts", str(file), *flags)[0] == 0
    assert prompts_seen == [whole]
    assert json.loads(run(PROMPT, *flags, "--json")[1])["num_prompt_tokens"] == len(whole)
    args = SimpleNamespace(chat=True, system="Short!", fit="last")
    text = f"{PROMPT}. " * 100
    cut = inputs.encode(text, tokenizer, config, None, 8, args)
    told = tokenizer.decode(cut)
    assert len(cut) == config.context_length - 8
    assert told.startswith("system\nShort!user\n")
    assert told.endswith(text[-200:] + "assistant\n")
    assert run(PROMPT, "--system", "Short!")[0] == 2


def test_each_token_is_a_line_of_json_and_the_report_is_the_last(run):
    report = json.loads(run(PROMPT, "-n", "8", "--json")[1])
    *lines, last = map(json.loads, run(PROMPT, "-n", "8", "--json-stream")[1].splitlines())
    assert [line["token_id"] for line in lines] == report["token_ids"] == last["token_ids"]
    assert "".join(line["text"] for line in lines) == report["text"]
    assert {line["origin"] for line in lines} <= {"draft", "retrieval", "recovered", "bonus"}
    assert set(last) == set(report)
    assert "logprobs" not in report


def test_log_probabilities_are_in_all_json(run, engine, tmp_path):
    flags = ("-n", "6", "--logprobs", "2", "--temperature", "0")
    report = json.loads(run(PROMPT, *flags, "--json")[1])
    lines = [*map(json.loads, run(PROMPT, *flags, "--json-stream")[1].splitlines())][:-1]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}))
    answer = json.loads(run("--prompts", str(file), *flags)[1])
    assert run(PROMPT, *flags)[1] == run(PROMPT, "-n", "6")[1]
    for logprobs, likeliest in (
        (report["logprobs"], report["top_logprobs"]),
        (answer["logprobs"], answer["top_logprobs"]),
        ([line["logprob"] for line in lines], [line["top_logprobs"] for line in lines]),
    ):
        assert [pairs[0][1] for pairs in likeliest] == logprobs  # greedy: the likeliest
        assert [pairs[0][0] for pairs in likeliest] == report["token_ids"]
        assert all(len(pairs) == 2 and pairs[1][1] <= pairs[0][1] < 0 for pairs in likeliest)


@pytest.mark.parametrize("flag", ["--json", "--json-stream"])
@pytest.mark.parametrize("wrong", [["-n", "0"], ["--warp"], ["--fit", "both"]])
def test_an_error_is_an_object_where_objects_are_read(run, flag, wrong):
    code, out, err = run(PROMPT, flag, *wrong)
    [line] = out.splitlines()
    assert code == 2
    assert err.splitlines()[-1] == f"minitri: {json.loads(line)['error']}"
    assert run(PROMPT, *wrong)[1] == ""


def test_one_line_says_tokens_seconds_speed_and_what_was_guessed(run):
    flags = (PROMPT, "-n", "24", "--method", "retrieval", "--gamma2", "3")
    code, out, err = run(*flags, "--json-stream")
    tokens = [json.loads(line) for line in out.splitlines()][:-1]
    guessed = sum(token["origin"] == "retrieval" for token in tokens) / 24
    assert code == 0
    assert guessed > 0
    assert re.fullmatch(
        r"24 tokens in [\d.]+ s, [\d.]+ s of it for the prompt, decoded at [\d.]+ tokens/s, about "
        rf"[\d.]+ times as fast as without speculation, {guessed:.0%} guessed",
        err.splitlines()[-1],
    )
    details = run(*flags, "--stats")[2]
    for word in ("prefill  ", "decode   ", "ms/token", "memory   weights"):
        assert word in details
        assert word not in err
    alone = run(PROMPT, "-n", "24", "--method", "autoregressive")[2].splitlines()[-1]
    assert alone.endswith(" tokens/s")


def test_the_speedup_is_over_passes_without_guesses(monkeypatch):
    target = LevelStats("target", num_rounds=10, num_draft_tokens=40, seconds=1.0)
    stats = Stats(num_decoded_tokens=42, decode_seconds=1.5, stages=[LevelStats("draft"), target])
    engine = SimpleNamespace(model=SimpleNamespace(device=SimpleNamespace(type="cpu")))
    alone = 0.1 / (1 + 4 * CPU.share_per_extra_token)
    found = report.speedup(engine, SimpleNamespace(stats=stats, rows=[None]))
    assert found == pytest.approx(42 * alone / 1.5)
    assert report.speedup(engine, SimpleNamespace(stats=stats, rows=[None] * 2)) is None
    target.num_draft_tokens = 0
    assert report.speedup(engine, SimpleNamespace(stats=stats, rows=[None])) is None


def test_bars_are_for_terminals(monkeypatch):
    args = generate.build_parser().parse_args([])
    assert not arguments.model_of(args)["progress"]
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert arguments.model_of(args)["progress"]


@pytest.fixture
def advised(folder, tmp_path):
    """A copy of the tiny model whose generation_config.json says this."""

    def write(**settings):
        model = tmp_path / "advised"
        shutil.copytree(folder, model, dirs_exist_ok=True)
        edit_json(model / "generation_config.json", **settings)
        return model

    return write


SAID = "sampling as the model's generation_config.json says: "


def test_sampling_is_as_the_model_says_where_no_flag_does(run, advised, tmp_path):
    model = advised(do_sample=True, temperature=0.6, top_p=0.9)
    assert minitri.load(model).sampling_defaults == minitri.SamplingParams(0.6, 0, 0.9)
    flags = (PROMPT, "-n", "8", "--seed", "4", "--json")
    code, out, err = run(*flags, model=model)
    assert (code, json.loads(out)["temperature"]) == (0, 0.6)
    assert f"{SAID}temperature 0.6, top-p 0.9; --temperature 0 is greedy" in err
    wanted = json.loads(run(*flags, "--temperature", "0.6", "--top-p", "0.9")[1])
    assert json.loads(out)["token_ids"] == wanted["token_ids"]
    _, out, err = run(*flags, "--temperature", "0", model=model)
    assert json.loads(out)["token_ids"] == json.loads(run(*flags)[1])["token_ids"]
    assert SAID not in err
    assert f"{SAID}top-p 0.9;" in run(*flags, "--temperature", "2", model=model)[2]
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "{PROMPT}"}}\n{{"prompt": "{PROMPT}", "temperature": 0}}')
    _, out, err = run("--prompts", str(file), *flags[1:-1], model=model)
    answers = {line["line"]: line["token_ids"] for line in map(json.loads, out.splitlines())}
    assert answers[1] == wanted["token_ids"]
    assert answers[2] == json.loads(run(*flags)[1])["token_ids"]
    assert "seed 4" not in err


def test_a_seed_is_drawn_and_said_for_what_the_model_samples(run, advised, tmp_path):
    model = advised(do_sample=True, temperature=0.7)
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "{PROMPT}"}}\n{{"prompt": "x", "seed": 3}}')
    _, out, err = run("--prompts", str(file), "-n", "2", model=model)
    seeds = {line["line"]: line["seed"] for line in map(json.loads, out.splitlines())}
    [drawn] = re.findall(r"^seed (\d+);", err, re.MULTILINE)
    assert seeds == {1: int(drawn), 2: 3}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}, {"temperature": True}, {"min_p": -1}],
)
def test_malformed_advice_warns_and_is_not_followed(run, advised, settings):
    code, out, err = run(PROMPT, "-n", "2", "--json", model=advised(do_sample=True, **settings))
    assert (code, json.loads(out)["temperature"]) == (0, 0)
    assert f"generation_config.json is not followed: {next(iter(settings))} is " in err


def test_advice_without_do_sample_is_greedy(run, advised):
    code, out, err = run(PROMPT, "-n", "2", "--json", model=advised(temperature=0.6))
    assert (code, json.loads(out)["temperature"]) == (0, 0)
    assert SAID not in err


def test_a_shell_completes_the_flags_of_each_program(tmp_path):
    pytest.importorskip("argcomplete")
    program = "import sys; sys.argv = ['minitri']; from minitri.__main__ import main; main()"
    for line, wanted in (
        ("minitri plan --gpu-m", "--gpu-memory"),
        ("minitri --json-", "--json-str"),
    ):
        answer = tmp_path / "answer"
        shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
        shell |= {"_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | shell, check=False, text=True
        )
        assert done.returncode == 0
        assert answer.read_text().startswith(wanted)


def test_a_mistake_elsewhere_is_no_bad_input(capsys):
    with pytest.raises(ValueError, match="a bug"), exits.clean_exits(as_json=True):
        raise ValueError("a bug")
    with pytest.raises(SystemExit), exits.clean_exits(as_json=True):
        raise InputError("x")
    assert capsys.readouterr().out == '{"error": "x"}\n'
