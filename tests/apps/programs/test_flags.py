"""Flags and defaults: each flag has an effect or says why not; help shows the usual ones first."""

import io
import re
import sys
from argparse import Action
from pathlib import Path

import pytest
import torch

import minitri
from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig, generate, loader
from minitri.apps import plan
from minitri.apps.chat import chatting
from minitri.apps.cli import arguments, inputs, scoring
from minitri.apps.selftest import selftesting
from minitri.apps.serve import access, app, serving
from minitri.files.hf_config import USUAL

ROOT = Path(__file__).parents[3]
CPU = "--dtype float32 --device cpu"
PROMPT = "She had been forced into prudence in her youth"


def flags_of(parser) -> dict[str, Action]:
    """Flags, but for --bitwise, which only refuses machines without kernels."""
    flags = {flag: action for action in parser._actions for flag in action.option_strings[-1:]}
    return {flag: action for flag, action in flags.items() if flag != "--bitwise"}


FLAGS = flags_of(generate.build_parser())
SETTINGS = vars(SamplingParams()) | vars(GenerationConfig()) | vars(SpeculationConfig())
VALUES = {"--json-schema": "{}", "--regex": "a+", "--rope-scaling": "yarn:2", "--logit-bias": "5:1"}
VALUES |= {"--system": "Short!", "--ray": "local", "--stop": "e", "--bad-words": "the"}
VALUES |= {"--draft-weights": "int4", "--gpu": "l4", "--memory": "0.01", "--host": "127.0.0.2"}


@pytest.fixture
def effect(folder, call, monkeypatch, tmp_path):
    """What a command does: its texts but for numbers, and all that reaches the engine."""
    seen = []

    def noted(owner, name):
        real = getattr(owner, name)

        def spy(*given, **settings):
            seen.append((name, repr(given[isinstance(owner, type) :]), repr(settings)))
            return real(*given, **settings)

        monkeypatch.setattr(owner, name, spy)

    monkeypatch.setattr(app.Server, "run", lambda *_, **__: None)
    for name in ("Server", "Service"):
        noted(app, name)
    noted(serving.socket, "create_server")
    noted(serving, "choose_rows")
    noted(loader, "OpenEngine")
    noted(torch, "set_num_threads")
    for name in ("stream", "generate", "complete", "open", "load_kv", "save_kv", "open_kv_store"):
        noted(Engine, name)
    monkeypatch.setattr(inputs, "is_piped", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The sea", "utf-8")
    num_threads = torch.get_num_threads()

    def effect(*words, main=generate.main, limits=f"{CPU} -n 4"):
        seen.clear()
        base = f"-m {folder} {limits}".split()
        code, out, err = call(main, *base, *words)
        reached = re.sub("0x[0-9a-f]+", "", str(seen))  # addresses
        torch.set_num_threads(num_threads)
        return code, out, re.sub(r"[\d.]+", "", err), reached

    return effect


def with_value(flag: str, action: Action) -> list[str]:
    """A flag with a value that differs from its default."""
    if action.nargs == 0:
        return [flag]
    choices = [it for it in action.choices or () if it not in ("auto", "float32")]
    usual = {"N": "3", "X": "0.5"}.get(action.metavar, "text")
    return [flag, VALUES.get(flag, choices[-1] if choices else usual)]


PROGRAMS = {  # each with a command line that its flags change
    "generate": (generate.main, f"{CPU} -n 4", PROMPT),
    "chat": (chatting.main, f"{CPU} -n 4", "--document=text"),
    "score": (scoring.main, CPU, "text"),
    "plan": (plan.main, "-m llama2-7b-128k --context 99999", "--gpu-memory=24"),
    "selftest": (selftesting.main, f"{CPU} -n 4 --num-samples 200", f"--prompt={PROMPT}"),
    "serve": (serving.main, CPU, "--port=0"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*PROGRAMS][1:]]


@pytest.mark.parametrize("name", ["generate", *SLOW])
def test_a_flag_alone_has_an_effect_or_a_line(name, effect, monkeypatch):
    main, limits, text = PROGRAMS[name]

    def done(*more: str) -> tuple:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who?"))
        code, out, *seen = effect(text, *more, main=main, limits=limits)
        return code, out if name in ("plan", "selftest") else re.sub(r"[-\d.,e\s]+", "", out), *seen

    plain, silent = done(), []
    own = [access.Access] if name == "serve" else []
    for flag, action in flags_of(arguments.OneLineParser(name, *own)).items():
        found = done(*with_value(flag, action))
        silent += [flag] * (found == plain)
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if found[0] == 0 and field in SETTINGS and name == "generate":
            value = re.compile(rf"\b{field}=(.*?)(?:, \w+=|\))")
            assert value.findall(found[3]) != value.findall(plain[3]), flag
    # Where nothing is said, or to be cut, or where the document is there already.
    assert {*silent} <= {"--quiet", "--verbose", "--fit", "--document"}


def test_files_of_other_programs_stay_as_the_table_of_files_says(effect, tmp_path):
    table = (ROOT / "docs/files.md").read_text("utf-8")
    (tmp_path / "other").write_text("mine")
    files = re.findall(r"^\| FILE of `(--[\w-]+)` \| `minitri", table, re.M)
    assert len(files) == 2
    assert {*files} <= {*re.findall(r"`(--[\w-]+)", table)} <= {*FLAGS, "--out", "--record"}
    for flag in files:
        code, *_ = effect("--prompts", "text", flag, "other")
        assert (code, (tmp_path / "other").read_text()) == (2, "mine")


def test_a_flag_that_is_given_again_adds_to_it(effect):
    words = ["--stop", "a", "--stop", "b", "--logit-bias", "7:-100", "--logit-bias", "8:1.5"]
    *_, reached = effect(PROMPT, *words)
    assert "stop=('a', 'b')" in reached
    assert "logit_bias=((7, -100.0), (8, 1.5))" in reached


def test_a_flag_that_another_one_lacks_is_refused_and_a_wrong_word_alone_is_blamed(effect):
    for flag, others in arguments.TABLE["needs"].items():
        code, _, err, seen = effect(PROMPT, flag, "3")
        assert (code, seen) == (2, "[]")
        assert all(other in err for other in others)
    code, _, err, _ = effect(PROMPT, "--methd", "naive")
    assert (code, "naive" in err) == (2, False)
    assert all(flag in err for flag in ("--methd", "--method?"))


def test_help_has_the_usual_flags_and_help_all_has_every_one(call):
    brief, whole = (call(generate.main, flag).out for flag in ("--help", "--help-all"))
    counts = [len(re.findall(r"^  (?:-\w[^\n]*, )?--[a-z]", text, re.M)) for text in (brief, whole)]
    assert counts[0] <= 25 < 2 * 25 < counts[1]
    assert all(flag in whole for flag in FLAGS)


def test_one_model_has_one_default_in_programs_and_the_library(run, advised):
    silent = advised(do_sample=None)  # its files recommend no sampling
    done = run(PROMPT, "--json", model=silent)
    assert f"temperature 0.7, top_p 0.9, seed {done.json['seed']}\n" in done.err
    again = run(PROMPT, "--seed", str(done.json["seed"]), "--json", model=silent).json
    assert again["token_ids"] == done.json["token_ids"]
    assert "; greedy\n" in run(PROMPT, "--temperature", "0", "--json", model=silent).err
    with minitri.load(silent, dtype="float32", device="cpu") as engine:
        assert engine.sampling_defaults == USUAL == SamplingParams(0.7, top_p=0.9)
        how = {"seed": again["seed"], "max_new_tokens": 8, "ignore_eos": True}
        assert list(engine.complete(PROMPT, **how).token_ids) == again["token_ids"]


def test_a_plan_has_the_dtype_of_a_run_here_and_knows_cards_in_capitals(call, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("minitri.files.open_models.kernels_for", lambda *_: None)  # no compiler
    dtype = str(minitri.load(folder).model.dtype).removeprefix("torch.")
    assert f" tokens, {dtype}\n" in call(plan.main, "-m", folder).out
    assert call(plan.main, "-m", "llama2-7b-128k", "--gpu", "H100").code == 0
