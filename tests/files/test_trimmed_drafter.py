"""Drafters made by tools/distill_draft.py: a few layers, and a head over frequent tokens."""

import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import minitri
from tests.conftest import refused, write_hf_folder
from tools import distill_data, distill_draft

pytestmark = pytest.mark.slow

FLAGS = shlex.split(
    "--text-tokens 1280 --own-tokens 1 --held-out-tokens 640 --head-tokens 200 "
    "--train-tokens 6000 --batch 4 --dtype float32 --device cpu --quiet"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    return write_hf_folder(folder, num_hidden_layers=3, max_position_embeddings=1200)


@pytest.fixture(scope="module")
def drafter(target, long_text, tmp_path_factory):
    """What the tool makes, without its handling of errors."""
    books = tmp_path_factory.mktemp("books")
    (books / "train.txt").write_text(long_text[:20_000])
    (books / "held-out.txt").write_text(long_text[30_000:40_000])

    out = tmp_path_factory.mktemp("drafters") / "drafter"
    files = {"model": target, "text": books / "train.txt", "held-out": books / "held-out.txt"}
    argv = [f"--{flag}={path}" for flag, path in (files | {"out": out}).items()]
    with pytest.MonkeyPatch.context() as patch:
        for tool in (distill_data, distill_draft):
            patch.setattr(tool, "W", 320)
            patch.setattr(tool, "BATCH", 4)
        distill_draft.make_drafter(distill_draft.build_parser().parse_args([*argv, *FLAGS]))
    return out


def load(target, drafter) -> minitri.Engine:
    return minitri.load(str(target), draft=str(drafter), dtype="float32", device="cpu")


def test_a_distilled_drafter_guesses_and_changes_no_text(target, drafter):
    engine = load(target, drafter)
    assert engine.models.draft.config.num_layers == 3
    how = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 1.0, "coupled": True, "seed": 0}
    alone = engine.complete(range(3, 200), method="autoregressive", **how)
    done = engine.complete(range(3, 200), method="triforce", budget=64, num_recent_tokens=60, **how)
    assert done.token_ids == alone.token_ids
    assert done.stats.levels[0].num_accepted_tokens > 0


def test_a_drafter_that_does_not_fit_is_refused(target, drafter, tmp_path):
    with refused("is a drafter for target, not a model"):
        minitri.load(str(drafter))
    for name, changes in (("other", {"seed": 7}), ("smaller", {"hidden_size": 32})):
        with refused("target", f"those of {name}"):
            load(write_hf_folder(tmp_path / name, **changes), drafter)
    left_out = shutil.ignore_patterns("labels", "training.pt")
    copy = shutil.copytree(drafter, tmp_path / "damaged", ignore=left_out)
    weights = load_file(copy / "model.safetensors")
    for ids, word in (
        (torch.full((200,), 4), "its tokens are damaged"),
        (torch.arange(121, 321), "its tokens are damaged"),
        (torch.rand(200), "lm_head.token_ids is torch.float32"),
    ):
        save_file(weights | {"lm_head.token_ids": ids}, copy / "model.safetensors")
        with refused(word):
            load(target, copy)
