"""Drafters that say some of the target's tokens, and read them from its embedding table."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import edit_json, load, refused, write_hf_folder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def drafter(folder, tmp_path_factory):
    """The target itself, with every other token of its head."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("drafters") / "drafter")
    weights = load_file(path / "model.safetensors")
    table = weights.pop(EMBEDDING)
    weights[HEAD] = weights.get(HEAD, table)[::2].clone()
    weights["lm_head.token_ids"] = torch.arange(0, len(table), 2)
    weights["target.embedding_sample"] = table[torch.linspace(0, len(table) - 1, 64).long()]
    save_file(weights, path / "model.safetensors")
    head = {"head_size": len(weights[HEAD]), "tie_word_embeddings": False}
    edit_json(path / "config.json", draft_of=folder.name, **head)
    return path


def test_a_trimmed_drafter_guesses_and_changes_no_text(folder, drafter):
    engine = load(folder, draft=drafter)
    how = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 1.0, "coupled": True, "seed": 0}
    alone = engine.complete(range(3, 100), method="autoregressive", **how)
    done = engine.complete(range(3, 100), method="triforce", budget=64, num_recent_tokens=60, **how)
    assert done.token_ids == alone.token_ids
    assert done.stats.levels[0].num_accepted_tokens > 0


def test_a_drafter_that_does_not_fit_is_refused(folder, drafter, tmp_path):
    with refused("is a drafter for tiny, not a model"):
        load(drafter)
    for name, changes in (("other", {"seed": 7}), ("smaller", {"hidden_size": 32})):
        with refused("tiny", f"those of {name}"):
            load(write_hf_folder(tmp_path / name, **changes), draft=drafter)
    copy = shutil.copytree(drafter, tmp_path / "damaged")
    weights = load_file(copy / "model.safetensors")
    num = len(weights["lm_head.token_ids"])
    for ids, word in (
        (torch.full((num,), 4), "its tokens are damaged"),
        (torch.arange(num) + 2 * num, "its tokens are damaged"),
        (torch.rand(num), "lm_head.token_ids is torch.float32"),
    ):
        save_file(weights | {"lm_head.token_ids": ids}, copy / "model.safetensors")
        with refused(word):
            load(folder, draft=copy)
