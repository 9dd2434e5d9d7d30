"""Drafters of some layers of the target: views of the real layers, files that name them, the tool
that finds them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

import minitri
from minitri import generate
from minitri.cpu.kernel_layers import use_kernels
from minitri.cpu.kernels import load_kernels
from minitri.drafters.layer_subset import read_layers, with_layers, write_layers
from minitri.drafters.lookup import Sources
from minitri.errors import InputError
from minitri.loading.open_models import fingerprint
from minitri.model.llama import Llama
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from tests.cascades import fresh_read, random_prompt
from tests.conftest import SENTENCES, tiny_config, tiny_model, write_hf_folder

TOOL = Path(__file__).parent.parent.parent / "tools/find_layers.py"
DEEP = tiny_config(num_layers=5)
PROMPT = "She had been forced into prudence; she had been"
LENGTH = GenerationConfig(24, ignore_eos=True)


def copied_layers(model: Llama, layers: list[int]) -> Llama:
    """The definition: a model of these layers, with weights of its own."""
    other = tiny_model(tiny_config(num_layers=len(layers)))
    weights = dict(model.named_parameters())
    for name, weight in other.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(layers[int(parts[1])])
        weight.copy_(weights[".".join(parts)])
    return other


@pytest.mark.parametrize("layers", [[0, 3], [4], [1, 2, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_view_is_the_model_of_these_layers_and_has_no_weights(layers, with_kernels):
    model = tiny_model(DEEP)
    expected = copied_layers(model, layers)
    if with_kernels:
        if (kernels := load_kernels()) is None:
            pytest.skip("there is no compiler")
        use_kernels(model, kernels)
        use_kernels(expected, kernels)
    tokens = random_prompt(DEEP, 9)
    plain = fresh_read(model, tokens)[1]
    view = with_layers(model, layers)
    assert torch.equal(fresh_read(view, tokens)[1], fresh_read(expected, tokens)[1])
    assert torch.equal(fresh_read(model, tokens)[1], plain)  # which is as it was
    assert {id(w) for w in view.parameters()} <= {id(w) for w in model.parameters()}
    assert view.num_bytes == 0
    assert (model.config.num_layers, len(model.layers)) == (5, 5)


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("deep") / "deep", num_hidden_layers=4)


def run(main, capsys, *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    return (ended.value.code, *capsys.readouterr())


def run_tool(capsys, *flags: str) -> tuple[int, str, str]:
    return run(runpy.run_path(str(TOOL))["main"], capsys, *flags)


@pytest.fixture
def layers_file(deep, tmp_path):
    engine = minitri.load(deep, draft="suffix", device="cpu")
    write_layers(tmp_path / "it.layers", [0, 2], engine.config, fingerprint(engine.tokenizer))
    return tmp_path / "it.layers"


@pytest.mark.parametrize("distribution", ["greedy", "coupled"])
@pytest.mark.parametrize("kept", [[0, 2], [0, 1, 2, 3], None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skipping_layers_changes_no_text(deep, layers_file, tmp_path, dtype, kept, distribution):
    """None: turns of lookup and the layers. In bfloat16 those of the copy in 4 bits draft."""
    engine = minitri.load(deep, draft="suffix", dtype="float32", device="cpu")
    sampling = SamplingParams(0.0 if distribution == "greedy" else 0.8)
    if kept is not None:
        write_layers(layers_file, kept, engine.config, fingerprint(engine.tokenizer))
    draft = f"layers:{layers_file}" + (",suffix" if kept is None else "")
    weights = "same" if dtype == "float32" else "auto"
    engine = minitri.load(deep, draft=draft, dtype=dtype, draft_weights=weights, device="cpu")
    if dtype == "bfloat16" and not engine.model.execution.is_row_invariant:
        pytest.skip("without compiled kernels texts may differ in the last bits")
    texts, accepted = set(), {}
    for method in ("autoregressive", "naive", "triforce", "auto"):
        speculation = SpeculationConfig(method, coupled=distribution == "coupled", gamma1=3)
        done = engine.complete(
            PROMPT, sampling=sampling, generation=LENGTH, speculation=speculation, seed=7
        )
        texts.add(done.token_ids)
        accepted[method] = [level.acceptance_rate for level in done.stats.levels]
    assert len(texts) == 1
    if kept == [0, 1, 2, 3] and dtype == "float32":
        assert accepted["naive"] == [1.0]


def test_a_drafter_of_layers_has_a_cache_of_its_own_layers(deep, layers_file):
    draft = f"layers:{layers_file}"
    engine = minitri.load(deep, draft=draft, draft_weights="same", dtype="float32", device="cpu")
    assert "drafter 2 layers of deep," in repr(engine)
    assert engine.draft.config.num_layers == 2
    assert engine.draft.lm_head.weight is engine.model.lm_head.weight
    assert engine.draft.layers[1] is engine.model.layers[2]


def change(**facts):
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_text(file.read_text()[:40]), "cannot be read"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda file: file.write_text("[" * 100_000), "cannot be read"),
        (lambda file: file.write_text(""), "cannot be read"),
        (lambda file: file.write_text("[]"), "is no file of layers"),
        (change(format="another"), "is no file of layers"),
        (change(num_layers=30), "of another model than deep, by its num_layers 30"),
        (change(hidden_size=[1]), "of another model than deep, by its hidden_size"),
        (change(vocabulary="0"), "of another model than deep, by its vocabulary"),
        (change(layers=[]), "has the layers []; they must be numbers from 0 to 3"),
        (change(layers=[0, 4]), "numbers from 0 to 3"),
        (change(layers=[-1, 2]), "numbers from 0 to 3"),
        (change(layers=[1, 1]), "in order"),
        (change(layers=[2, 1]), "in order"),
        (change(layers=[True]), "numbers from 0 to 3"),
        (change(layers=[0, 1.0]), "numbers from 0 to 3"),
        (change(layers="01"), "numbers from 0 to 3"),
        (change(layers=None), "numbers from 0 to 3"),
    ],
)
def test_a_file_of_layers_that_does_not_fit_is_refused_in_one_line(
    deep, layers_file, capsys, damage, words
):
    damage(layers_file)
    flags = ("--model", str(deep), "--draft", f"layers:{layers_file}", "--method", "naive")
    code, out, err = run(generate.main, capsys, *flags, "--prompt", PROMPT, "--quiet")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err
    assert "tools/find_layers.py" in err


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("suffix,suffix", "more than one lookup, suffix and suffix"),
        ("suffix,datastore:x", "more than one lookup, suffix and datastore:x"),
        ("{deep},{deep}", "more than one model"),
        ("layers:{file},{deep}", "more than one model"),
        ("suffix,", "an empty name"),
        (",suffix", "an empty name"),
        (",", "an empty name"),
        ("suffix,no such model", "unknown model"),
        ("suffix,none", "unknown model"),
        ("layers:", "cannot be read"),
        ("suffix,layers:~nobody-of-this-name/it", "cannot be read"),
    ],
)
def test_several_drafters_that_cannot_be_are_refused_in_one_line(
    deep, layers_file, capsys, draft, words
):
    draft = draft.format(deep=deep, file=layers_file)
    flags = ("--model", str(deep), "--draft", draft, "--method", "naive", "--prompt", PROMPT)
    code, out, err = run(generate.main, capsys, *flags, "--quiet")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


def test_the_command_line_reports_both_drafters(deep, layers_file, capsys):
    flags = ("--model", str(deep), "--method", "naive", "--prompt", PROMPT, "--dtype", "float32")
    flags += ("--draft", f"layers:{layers_file},suffix", "--max-new-tokens", "20")
    code, out, _ = run(generate.main, capsys, *flags, "--json", "--draft-history")
    report = json.loads(out)
    assert code == 0
    assert report["draft"] == "suffix,2 layers of deep"
    assert [drafter["name"] for drafter in report["drafters"]] == ["lookup", "draft"]
    code, out, err = run(generate.main, capsys, *flags, "--color", "--stats")
    assert code == 0
    assert "by draft " in err


def test_the_tool_finds_layers_that_the_command_line_uses(deep, tmp_path, capsys):
    (tmp_path / "text").write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    flags = (str(deep), str(tmp_path / "text"), "--keep", "2", "--dtype", "float32", "--out")
    found = []
    for name in ("one", "two"):
        code, out, err = run_tool(capsys, *flags, str(tmp_path / name), "--swaps", "6")
        assert code == 0
        assert " of deep; overlap 0." in out
        assert "2 layers, without" in err
        found.append((tmp_path / name).read_text())
    assert found[0] == found[1]
    engine = minitri.load(deep, draft=f"layers:{tmp_path / 'one'}", device="cpu")
    assert engine.draft.config.num_layers == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--keep", "5"], "--keep is 5, but deep has 4 layers"),
        (["--keep", "0"], "whole number"),
        (["--temperature", "-1"], "the temperature is -1.0"),
        (["--temperature", "nan"], "the temperature is nan"),
        (["--out", "missing/it"], "cannot write missing/it"),
        (["--windows", "0"], "whole number"),
    ],
)
def test_bad_input_to_the_tool_is_refused_in_one_line(deep, tmp_path, capsys, flags, words):
    (tmp_path / "text").write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    needed = [str(deep), str(tmp_path / "text"), "--keep", "4", "--out", str(tmp_path / "it")]
    code, out, err = run_tool(capsys, *needed, *flags)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_a_text_shorter_than_a_window_is_refused(deep, tmp_path, capsys):
    (tmp_path / "text").write_text("short")
    flags = (str(deep), str(tmp_path / "text"), "--keep", "2", "--out", str(tmp_path / "it"))
    code, _, err = run_tool(capsys, *flags)
    assert code == 2
    assert "give a text of 128 or more" in err


def test_what_was_written_is_read(tmp_path):
    write_layers(tmp_path / "it", [1, 3], DEEP, "words")
    assert read_layers(tmp_path / "it", DEEP, "words") == [1, 3]
    with pytest.raises(InputError, match="another model"):
        read_layers(tmp_path / "it", DEEP, "other words")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_layers_and_their_turns_with_lookup_change_no_text(real_weights, long_text):
    engine = minitri.load("smollm2-135m", draft="suffix", dtype="float32", device="cpu")
    prompt, layers = engine.tokenizer.encode(long_text, 300), [*range(6), *range(20, 30)]
    drafter = with_layers(engine.model, layers)
    models = engine.model, engine.tokenizer, drafter, engine.retrieval_model
    alone, turns = minitri.Engine(*models), minitri.Engine(*models, Sources(takes_turns=True))
    for sampling, coupled in ((SamplingParams(0.0), False), (SamplingParams(0.8), True)):
        settings = {"sampling": sampling, "generation": LENGTH, "seed": 5}
        texts = set()
        for drafted, method in ((alone, "autoregressive"), (alone, "naive"), (turns, "triforce")):
            speculation = SpeculationConfig(method, coupled=coupled, gamma1=2, budget=256)
            done = drafted.complete(prompt, speculation=speculation, **settings)
            texts.add(done.token_ids)
        assert len(texts) == 1
        assert sum(drafter.num_accepted_tokens for drafter in done.stats.drafters) > 0
