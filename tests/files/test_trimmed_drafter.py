"""Drafters made by tools/distill_draft.py: a few layers, and a head over frequent tokens."""

import itertools
import json
import re
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import minitri
from minitri import InputError, SamplingParams
from tests.cascades import settings_of
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


def distill(target, books, out, flags: str = "", text: str = "train.txt") -> None:
    """What `main` does inside its handling of errors."""
    files = ("--text", str(books / text), "--held-out", str(books / "held-out.txt"))
    argv = ["--model", str(target), *files, "--out", str(out), *FLAGS, *shlex.split(flags)]
    distill_draft.make_drafter(distill_draft.build_parser().parse_args(argv))


@pytest.fixture(scope="module")
def drafter(target, books, tmp_path_factory):
    out = tmp_path_factory.mktemp("drafters") / "drafter"
    distill(target, books, out)
    return out


def load(target, drafter) -> minitri.Engine:
    return minitri.load(str(target), draft=str(drafter), dtype="float32", device="cpu")


def refused(target, drafter, match: str) -> None:
    with pytest.raises(InputError, match=match):
        load(target, drafter)


def test_a_distilled_drafter_guesses_and_changes_nothing(target, drafter):
    engine = load(target, drafter)
    assert engine.models.draft is not None
    assert engine.models.draft.config.num_layers == 3
    sizes = {"budget": 64, "num_recent_tokens": 60, "coupled": True}
    methods = "autoregressive", "naive", "triforce"
    ways = (settings_of(method, 60, SamplingParams(1.0), **sizes) for method in methods)
    alone, *others = (engine.complete(range(3, 200), **way) for way in ways)
    for done in others:
        assert done.token_ids == alone.token_ids
        assert done.stats.levels[0].num_accepted_tokens > 0


def test_training_makes_held_out_acceptance_better(target, books, tmp_path, capsys):
    """One layer of the three, and random distributions: little can be learned, and it is."""
    flags = "--layers 1 --train-tokens 100000 --learning-rate 0.003"
    distill(target, books, tmp_path / "a", flags)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "accepted of held-out texts:" in line]
    rates = [[float(rate) for rate in re.findall(r"(\S+) at ", line)] for line in lines]
    assert len(rates[0]) == 3
    assert all(last > 1.5 * first for first, last in zip(rates[0], rates[-1], strict=True)), rates


def test_an_interrupted_distillation_goes_on_where_it_was(target, books, tmp_path, monkeypatch):
    """Killed while it labels and while it trains, it ends with the drafter of a run left alone."""
    distill(target, books, tmp_path / "whole")

    def interrupt(owner, name, at):
        function, calls = getattr(owner, name), itertools.count(1)

        def call(*args):
            if next(calls) == at:
                raise KeyboardInterrupt
            return function(*args)

        monkeypatch.setattr(owner, name, call)

    interrupt(distill_data.LabelStore, "append", 3)
    interrupt(distill_draft, "distillation_loss", 4)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            distill(target, books, tmp_path / "parts")
    distill(target, books, tmp_path / "parts")
    whole, parts = (load_file(tmp_path / it / "model.safetensors") for it in ("whole", "parts"))
    torch.testing.assert_close(whole, parts, rtol=0, atol=0)


def test_a_drafter_is_not_a_model_nor_for_another_target(drafter, tmp_path):
    with pytest.raises(InputError, match="is a drafter for target, not a model"):
        minitri.load(str(drafter))
    for name, changes in (("other", {"seed": 7}), ("smaller", {"hidden_size": 32})):
        refused(write_hf_folder(tmp_path / name, **changes), drafter, f"target, .* those of {name}")


IDS = "lm_head.token_ids"


@pytest.mark.parametrize(
    ("ids", "head_size", "match"),
    [
        (None, 200, f"lacks 1 tensors .*{IDS}"),
        (torch.full((200,), 4), 200, f"{IDS} are not 200 different tokens of 320"),
        (torch.arange(121, 321), 200, f"{IDS} are not 200 different tokens of 320"),
        (torch.rand(200), 200, f"{IDS} is torch.float32"),
        (torch.arange(200), 0, "head_size is "),
    ],
)
def test_a_head_with_a_wrong_id_map_is_refused(target, drafter, tmp_path, ids, head_size, match):
    left_out = shutil.ignore_patterns("labels", "training.pt")
    folder = shutil.copytree(drafter, tmp_path / "damaged", ignore=left_out)
    tensors = load_file(folder / "model.safetensors") | {IDS: ids}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    edit_json(folder / "config.json", head_size=head_size)
    refused(target, folder, match)


def test_labels_made_with_other_settings_are_not_mixed(target, books, drafter):
    with pytest.raises(InputError, match="was made with other settings"):
        distill(target, books, drafter, "--seed 1")
    meta = json.loads((drafter / "labels" / "train" / "meta.json").read_text())
    assert meta["files"] == ["train.txt"]


def test_bad_input_to_distillation_is_one_line(target, books, tmp_path):
    short = books / "short.txt"
    short.write_text("Too short.")
    for flags, text, message in (
        (f"--text {tmp_path}/none.txt", "train.txt", "cannot read"),
        (f"--held-out {books}/train.txt", "train.txt", "given as --text and as --held-out"),
        ("--layers 0,9", "train.txt", "--layers 0,9 are not numbers from 0 to 2"),
        ("", short.name, "the longest text has .* tokens; training needs at least 1024"),
    ):
        with pytest.raises(InputError, match=message):
            distill(target, books, tmp_path / "out", flags, text)
