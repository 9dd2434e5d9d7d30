"""Drafters made by tools/distill_draft.py: the target's embeddings, a few layers, a head over
frequent tokens."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import minitri
from minitri import End, GenerationConfig, InputError, SamplingParams, SpeculationConfig
from tests.conftest import edit_json, write_hf_folder
from tools import distill_data, distill_draft

pytestmark = pytest.mark.slow

FLAGS = shlex.split(
    "--text-tokens 4096 --own-tokens 1 --held-out-tokens 2048 --head-tokens 200 "
    "--train-tokens 6000 --batch 4 --dtype float32 --device cpu --quiet"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_hf_folder(
        tmp_path_factory.mktemp("models") / "target",
        num_hidden_layers=3,
        max_position_embeddings=1200,
    )


@pytest.fixture(scope="module")
def books(tmp_path_factory, long_text):
    folder = tmp_path_factory.mktemp("books")
    (folder / "train.txt").write_text(long_text[:20_000])
    (folder / "held-out.txt").write_text(long_text[30_000:40_000])
    return folder


def distill(target, books, out, *flags: str, text: str = "train.txt") -> None:
    """What `main` does inside its handling of errors."""
    program = distill_draft
    files = ("--text", str(books / text), "--held-out", str(books / "held-out.txt"))
    argv = ["--model", str(target), *files, "--out", str(out), *FLAGS, *flags]
    program.make_drafter(program.build_parser().parse_args(argv))


@pytest.fixture(scope="module")
def drafter(target, books, tmp_path_factory):
    out = tmp_path_factory.mktemp("drafters") / "drafter"
    distill(target, books, out)
    return out


def load(target, drafter) -> minitri.Engine:
    return minitri.load(str(target), draft=str(drafter), dtype="float32", device="cpu")


def refusal(target, drafter) -> str:
    with pytest.raises(InputError) as refused:
        load(target, drafter)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def damaged(drafter, tmp_path, change):
    folder = shutil.copytree(
        drafter, tmp_path / "damaged", ignore=shutil.ignore_patterns("labels", "training.pt")
    )
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_distilled_drafter_guesses_and_changes_nothing(target, drafter):
    engine = load(target, drafter)
    assert engine.draft is not None
    assert engine.draft.config.num_layers == 3
    prompt, generation = list(range(3, 200)), GenerationConfig(60, ignore_eos=True)
    for sampling, coupled in ((SamplingParams(), False), (SamplingParams(1.0), True)):
        texts = []
        for method in ("autoregressive", "naive", "triforce"):
            speculation = SpeculationConfig(
                method, budget=64, num_recent_tokens=60, coupled=coupled
            )
            *_, end = engine.generate(
                prompt, sampling=sampling, generation=generation, speculation=speculation, seed=3
            )
            assert isinstance(end, End)
            texts.append(end.token_ids)
            if method != "autoregressive":
                assert end.stats.levels[0].num_accepted_tokens > 0
        assert texts[0] == texts[1] == texts[2]


def test_the_head_says_its_tokens_and_no_others(target, drafter):
    draft = load(target, drafter).draft
    assert draft is not None
    logits = draft.logits(torch.randn(2, 3, draft.config.hidden_size))
    assert logits.shape == (2, 3, 320)
    known = torch.zeros(320, dtype=torch.bool)
    known[draft.lm_head.token_ids] = True
    assert known.sum() == 200
    assert torch.isfinite(logits[..., known]).all()
    assert (logits[..., ~known] == -torch.inf).all()


def test_training_makes_held_out_acceptance_better(target, books, tmp_path, capsys):
    """One layer of the three, and random distributions: little can be learned, and it is."""
    distill(
        target,
        books,
        tmp_path / "a",
        "--layers",
        "1",
        "--train-tokens",
        "100000",
        "--learning-rate",
        "0.003",
    )
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "accepted of held-out texts:" in line
    ]
    rates = [
        [float(part.split(" at ")[0].split()[-1]) for part in line.split(", ") if " at " in part]
        for line in lines
    ]
    assert len(rates[0]) == 3
    assert all(last > 1.5 * first for first, last in zip(rates[0], rates[-1], strict=True)), rates


def test_an_interrupted_distillation_goes_on_where_it_was(target, books, tmp_path, monkeypatch):
    """Killed while it labels and killed while it trains, it ends with the very drafter of a run
    that was left alone."""
    distill(target, books, tmp_path / "whole")
    draft, data = distill_draft, distill_data
    append, loss, calls = data.LabelStore.append, draft.distillation_loss, {"append": 0, "loss": 0}

    def interrupted(name, function, at):
        def call(*args):
            calls[name] += 1
            if calls[name] == at:
                raise KeyboardInterrupt
            return function(*args)

        return call

    monkeypatch.setattr(data.LabelStore, "append", interrupted("append", append, 3))
    monkeypatch.setattr(draft, "distillation_loss", interrupted("loss", loss, 4))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            distill(target, books, tmp_path / "parts")
    distill(target, books, tmp_path / "parts")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_drafter_is_not_a_model(drafter):
    with pytest.raises(
        InputError, match="is a drafter for target without an embedding table of its own"
    ):
        minitri.load(str(drafter))


def test_a_drafter_for_another_target_is_refused(drafter, tmp_path):
    other = write_hf_folder(tmp_path / "other", seed=7)
    assert "made for target, whose embeddings are not those of other (cosine" in refusal(
        other, drafter
    )
    smaller = write_hf_folder(tmp_path / "smaller", hidden_size=32)
    assert "whose embedding table is (320, 64); that of smaller is (320, 32)" in refusal(
        smaller, drafter
    )


def test_a_head_without_or_with_a_wrong_id_map_is_refused(target, drafter, tmp_path):
    folder = damaged(drafter, tmp_path, lambda tensors: tensors.pop("lm_head.token_ids"))
    assert "lacks 1 tensors: lm_head.token_ids" in refusal(target, folder)
    shutil.rmtree(folder)
    damaged(drafter, tmp_path, lambda tensors: tensors["lm_head.token_ids"].fill_(4))
    assert "lm_head.token_ids are not 200 different tokens of 320" in refusal(target, folder)
    shutil.rmtree(folder)
    damaged(
        drafter, tmp_path, lambda tensors: tensors.update({"lm_head.token_ids": torch.rand(200)})
    )
    assert "not plain integers" in refusal(target, folder)
    shutil.rmtree(folder)
    damaged(drafter, tmp_path, lambda tensors: None)
    edit_json(folder / "config.json", head_size=0)
    assert "head_size is " in refusal(target, folder)


def test_bad_input_to_distillation_is_one_line(target, books, tmp_path):
    short = books / "short.txt"
    short.write_text("Too short.")
    cases = (
        (["--text", str(tmp_path / "none.txt")], "cannot read"),
        (["--held-out", str(books / "train.txt")], "given as --text and as --held-out"),
        (["--layers", "0,9"], "--layers 0,9 are not numbers from 0 to 2"),
    )
    for flags, message in cases:
        with pytest.raises(InputError, match=message):
            distill(target, books, tmp_path / "out", *flags)
    with pytest.raises(
        InputError, match="the longest text has .* tokens; training needs at least 1024"
    ):
        distill(target, books, tmp_path / "out", text=short.name)


def test_labels_made_with_other_settings_are_not_mixed(target, books, tmp_path):
    distill(target, books, tmp_path / "out")
    with pytest.raises(InputError, match="was made with other settings"):
        distill(target, books, tmp_path / "out", "--seed", "1")
    meta = json.loads((tmp_path / "out" / "labels" / "train" / "meta.json").read_text())
    assert meta["files"] == ["train.txt"]
