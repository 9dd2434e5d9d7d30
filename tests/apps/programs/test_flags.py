"""Flags and defaults: one default of sampling for one model, in programs and the library."""

import shutil

import pytest

import minitri
from minitri import SamplingParams
from minitri.files.hf_config import USUAL
from tests.conftest import edit_json

PROMPT = "She had been forced into prudence in her youth"


@pytest.fixture
def silent(folder, tmp_path):
    """A model whose files recommend no sampling."""
    model = shutil.copytree(folder, tmp_path / "silent")
    edit_json(model / "generation_config.json", do_sample=None)
    return model


def test_one_model_has_one_default_in_programs_and_the_library(run, silent):
    done = run(PROMPT, "--json", model=silent)
    assert f"temperature 0.7, top_p 0.9, seed {done.json['seed']}\n" in done.err
    again = run(PROMPT, "--seed", str(done.json["seed"]), "--json", model=silent).json
    assert again["token_ids"] == done.json["token_ids"]
    assert run(PROMPT, "--temperature", "0", "--json", model=silent).err.endswith("greedy\n")
    with minitri.load(silent, dtype="float32", device="cpu") as engine:
        assert engine.sampling_defaults == USUAL == SamplingParams(0.7, top_p=0.9)
        how = {"seed": again["seed"], "max_new_tokens": 8, "ignore_eos": True}
        assert list(engine.complete(PROMPT, **how).token_ids) == again["token_ids"]
