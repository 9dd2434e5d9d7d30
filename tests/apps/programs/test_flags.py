"""Flags and defaults: each flag has an effect or says why not; help shows the usual ones first."""

import re
import shlex
from argparse import Namespace

import pytest
import torch

import minitri
from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig, generate, loader
from minitri.apps.cli import arguments, inputs
from minitri.files.hf_config import USUAL

PROMPT = "She had been forced into prudence in her youth"
FLAGS = {
    flag: action
    for action in generate.build_parser()._actions
    if (flag := action.option_strings[-1] if action.option_strings else "") not in ("", "--bitwise")
}
"""Flags of `generate`; --bitwise is left out, which only refuses machines without kernels."""
SETTINGS = vars(SamplingParams()) | vars(GenerationConfig()) | vars(SpeculationConfig())
VALUES = {"--json-schema": "{}", "--regex": "a+", "--rope-scaling": "yarn:2", "--logit-bias": "5:1"}
VALUES |= {"--system": "Short!", "--ray": "local", "--stop": "e", "--bad-words": "the"}


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

    noted(loader, "OpenEngine")
    noted(torch, "set_num_threads")
    for name in ("stream", "load_kv", "save_kv", "open_kv_store"):
        noted(Engine, name)
    monkeypatch.setattr(inputs, "is_piped", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("The sea", "utf-8")
    num_threads = torch.get_num_threads()

    def effect(*words):
        seen.clear()
        base = f"-m {folder} --dtype float32 --device cpu -n 4".split()
        code, out, err = call(generate.main, *base, *words)
        reached = str(seen)
        torch.set_num_threads(num_threads)
        return code, out, re.sub(r"[\d.]+", "", err), reached

    return effect


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_alone_has_an_effect_or_a_line(flag, effect):
    action = FLAGS[flag]
    words = [flag]
    if action.nargs != 0:
        default = {int: "3", float: "0.5"}.get(action.type, "text")
        choices = [it for it in action.choices or () if it not in ("auto", "float32")]
        number = "3" if action.metavar == "N" else default
        words.append(choices[-1] if choices else VALUES.get(flag, number))
    is_prompt = flag in ("--prompt", "--prompt-file", "--demo", "--prompts")
    found, plain = effect(*words, *[PROMPT] * (not is_prompt)), effect(PROMPT)
    assert found != plain
    field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if found[0] == 0 and field in SETTINGS:
        value = re.compile(rf"\b{field}=(.*?)(?:, \w+=|\))")
        assert value.findall(found[3]) != value.findall(plain[3])


def test_a_flag_that_is_given_again_adds_to_it(effect):
    words = ["--stop", "a", "--stop", "b", "--logit-bias", "7:-100", "--logit-bias", "8:1.5"]
    *_, reached = effect(PROMPT, *words)
    assert "stop=('a', 'b')" in reached
    assert "logit_bias=((7, -100.0), (8, 1.5))" in reached


def test_a_flag_that_another_one_lacks_is_refused_and_a_wrong_word_alone_is_blamed(effect):
    for flag, others in arguments.NEEDS.items():
        code, _, err, seen = effect(PROMPT, flag, "3")
        assert (code, seen) == (2, "[]")
        assert all(other in err for other in others)
    code, _, err, _ = effect(PROMPT, "--methd", "naive")
    assert (code, "naive" in err) == (2, False)
    assert "--methd" in err


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


@pytest.mark.slow
def test_examples_about_a_novel_fit_the_default_model(real_weights, long_text):
    opened = loader.OpenEngine(model=str(real_weights), draft="suffix")
    lines = re.findall(r"^minitri (generate|score) (.*novel.txt.*)$", arguments.HELP, re.M)
    assert len(lines) == 3
    for name, line in lines:
        words = shlex.split(line.partition(" < ")[0])
        args: Namespace = arguments.OneLineParser(name).parse_args(words)
        assert len(inputs.encode(long_text, opened, args)) == args.max_prompt_tokens
