"""Families of models: each equals `transformers`, from its folder and from a GGUF file, and no
stage, cache or batch changes its text."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minitri import Request
from tests.conftest import edit_json, load, texts_of, write_hf_folder
from tests.core.rigs import fresh_read, random_prompt, tiny_config
from tests.devices.gpu_twins.conftest import offloaded
from tests.files.test_checkpoint import as_gguf

TOLERANCE = 1e-5
"""Largest allowed difference of logits, as a share of the largest, float32."""
KINDS, VARIANTS, OLD, FACTORS = (
    json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))[name]
    for name in ("KINDS", "VARIANTS", "OLD", "FACTORS")
)
"""By family and variant: settings of a config.json, and keys of a GGUF file; by variant settings of
a config.json alone; those of Gemma 3 as its makers wrote them; divisors of LongRoPE."""
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
WAYS = [{"method": name} for name in ("naive", "retrieval", "triforce")]
WAYS.append({"method": "triforce", "gamma1": None, "tree": "3x2"})
SMALL = {"budget": 32, "chunk_size": 4, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3}
SMALL |= {"rebuild_stride": 9, "prefill_chunk": 16}


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    """A folder with the name of its kind."""
    kind = request.param
    folder = tmp_path_factory.mktemp("models") / kind
    write_hf_folder(folder, model_type=kind.split(",")[0], **KINDS[kind][0])
    if kind == "gemma3_text":  # as its makers wrote it, not as `transformers` does today
        edit_json(folder / "config.json", **OLD)
    return folder


@pytest.fixture(scope="module")
def draft(path):
    """A folder of a model that guesses nearly what the family's model says."""
    folder = shutil.copytree(path, path.with_name("draft"))
    weights = load_file(folder / "model.safetensors")
    noisy = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


def check_logits(path, *sources):
    """What each source gives is what `transformers` gives of a folder, in chunks of any size."""
    from transformers import AutoModelForCausalLM

    tokens = random_prompt(tiny_config(vocab_size=320), 150)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    for source in sources:
        model = load(source).model
        for size in (150, 64, 17, 1):
            difference = (fresh_read(model, tokens, size)[1] - wanted).abs().max()
            assert difference < TOLERANCE * wanted.abs().max(), source


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_one_shot_chunked_and_incremental(variant, tmp_path):
    path = write_hf_folder(tmp_path / "model", **VARIANTS[variant])
    check_logits(path, path)


def test_logits_equal_those_of_transformers_and_of_a_gguf_file(path, tmp_path):
    kind = path.name
    family = ARCHITECTURES.get(kind, kind.split(",")[0])
    changes = {f"{family}.{key}": value for key, value in KINDS[kind][1].items()}
    if "," in kind:
        for key, values in FACTORS.items():
            name = key.removesuffix("_factor")
            changes[f"rope_factors_{name}.weight"] = np.array(values, np.float32)
    file = as_gguf(path, tmp_path / "x.gguf", architecture=family, changes=changes)
    check_logits(path, path, file)


def test_no_stage_batch_or_tree_changes_the_text(path, draft, monkeypatch):
    """Prompts differ in length, and share a prefix; in one way K and V are offloaded."""
    engine = load(path, draft=str(draft))
    prompts = [random_prompt(engine.config, n, seed=n) for n in (90, 3)]
    prompts.append([*prompts[0][:70], 5, 6])
    make = functools.partial(offloaded, 1, 2, 512, config=engine.config)
    for place, way in enumerate(WAYS):
        coupled = place % 2 == 1
        fields = {"temperature": 0.8 * coupled, "max_new_tokens": 12, "ignore_eos": True}
        requests = [Request(prompt, 7, **fields) for prompt in prompts]
        how = {**SMALL, "coupled": coupled}
        alone = [texts_of(engine.stream([it], method="autoregressive", **how)) for it in requests]
        engine.release()
        with monkeypatch.context() as patch:
            if way["method"] == "retrieval":
                patch.setattr("minitri.core.memory.allocate_full_cache", lambda *_: make())
            events = engine.stream(requests, batch_size=2, **{**how, **way})
            assert [[text] for text in texts_of(events)] == alone, way
