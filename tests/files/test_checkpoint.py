"""Every format loads to the same model, and GGUF's conventions mean what Hugging Face's mean."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import minitri
from minitri.core.config import RopeConfig, stretch_rope
from minitri.core.model.block import read_block
from minitri.core.model.rope import rope_frequencies
from minitri.files.fetch import Located
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder
from tests.conftest import byte_level_tokenizer, load, refused, write_hf_folder
from tests.core.rigs import new_cache
from tests.files.gguf_writer import write_gguf

TOKENS = torch.randint(0, 320, (1, 20), generator=torch.Generator().manual_seed(0))


def logits(engine: minitri.Engine) -> torch.Tensor:
    model = engine.model
    return model.logits(read_block(model, TOKENS.tolist(), new_cache(model.config)))


def copy_of(folder: Path, target: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*left_out)))


def sharded(folder: Path, target: Path, ending: str = "safetensors") -> Path:
    copy_of(folder, target, "*.safetensors")
    weights = load_file(folder / "model.safetensors")
    stem, save = {"bin": ("pytorch_model", torch.save), "safetensors": ("model", save_file)}[ending]
    names = sorted(weights)
    index = {name: f"{stem}-{1 + i % 3:05d}-of-00003.{ending}" for i, name in enumerate(names)}
    for shard in set(index.values()):
        save({name: weights[name] for name in names if index[name] == shard}, target / shard)
    (target / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": index}))
    return target


def as_gguf(folder: Path, path: Path, **options) -> Path:
    config = Folder(folder).config("tiny")
    weights = load_file(folder / "model.safetensors")
    return write_gguf(path, config, byte_level_tokenizer(), weights, **options)


@pytest.mark.parametrize("layout", ["zipped", "old parameters", "bin", "safetensors", "gguf"])
def test_every_format_loads_to_the_same_model(layout, folder, tmp_path):
    target = tmp_path / "x.gguf"
    if layout in ("bin", "safetensors"):
        sharded(folder, target, layout)
    elif layout == "gguf":
        as_gguf(folder, target)
    else:
        copy_of(folder, target, "*.safetensors")
        weights = load_file(folder / "model.safetensors")
        is_zipped = layout == "zipped"
        if not is_zipped:
            weights = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
        file = target / "pytorch_model.bin"
        torch.save(weights, file, _use_new_zipfile_serialization=is_zipped)
    assert torch.equal(logits(load(target)), logits(load(folder)))


YARN = RopeConfig(kind="yarn", factor=4.0, original_context=128, beta_fast=16.0, beta_slow=2.0)
TRAINED = {"original_context_length": 128, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"factor": 4.0}, RopeConfig(kind="linear", factor=4.0, original_context=512)),
        ({"type": "none"}, RopeConfig()),
        ({"type": "yarn", "factor": 4.0} | TRAINED, YARN),
    ],
)
def test_gguf_rope_scaling_and_end_tokens_arrive(folder, tmp_path, settings, wanted):
    changes = {f"llama.rope.scaling.{key}": value for key, value in settings.items()}
    changes["tokenizer.ggml.eot_token_id"] = 7
    config = GgufFile(as_gguf(folder, tmp_path / "x.gguf", changes=changes)).config("x")
    assert config.rope == wanted
    assert config.eos_token_ids == (2, 7)


def test_gguf_divisors_are_llama3_scaling(folder, tmp_path):
    """llama.cpp stores llama3 scaling as a tensor of divisors; the result must be the formula's."""
    llama3 = RopeConfig(kind="llama3", factor=8.0, original_context=64)
    wanted, _ = rope_frequencies(llama3, 16)
    divisors = (rope_frequencies(RopeConfig(), 16)[0] / wanted).numpy()
    path = as_gguf(folder, tmp_path / "x.gguf", changes={"rope_freqs.weight": divisors})
    config = load(path).config
    assert torch.allclose(rope_frequencies(config.rope, 16)[0], wanted)
    with refused("rope_scaling="):
        stretch_rope(config, "yarn:4")


def test_tied_heads_stored_all_the_same_and_old_rotary_buffers_are_passed_over(tmp_path):
    tied = write_hf_folder(tmp_path / "tied", tie_word_embeddings=True)
    wanted = logits(load(tied))
    file = tied / "model.safetensors"
    more = {"lm_head.weight": torch.zeros(320, 64)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(load_file(file) | more, file)
    with refused("tie_word_embeddings=true", "lm_head.weight of its own", "set that to false"):
        load(tied)
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(320, 64).to(torch.cfloat)}, file)
    with refused("lm_head.weight is torch.complex64"):
        load(tied)
    more["lm_head.weight"] = load_file(file)["model.embed_tokens.weight"]
    save_file(load_file(file) | more, file)
    assert torch.equal(logits(load(tied)), wanted)
    weights = load_file(file)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, file)
    assert torch.equal(logits(load(tied)), wanted)


def test_one_file_wins_over_shards_of_before(folder, tmp_path):
    copy = sharded(write_hf_folder(tmp_path / "other", seed=1), tmp_path / "copy")
    shutil.copy(folder / "model.safetensors", copy)
    assert torch.equal(logits(load(copy)), logits(load(folder)))


def test_tokens_added_without_a_row_of_weights_run_until_a_prompt_has_one(folder, tmp_path):
    copy = copy_of(folder, tmp_path / "copy")
    pipeline = byte_level_tokenizer()
    pipeline.add_special_tokens([f"<new{number}>" for number in range(12)])  # 10 fill the table
    pipeline.save(str(copy / "tokenizer.json"))
    engine = load(copy)
    how = {"max_new_tokens": 3, "ignore_eos": True, "bad_words": ["<new11>", "a"]}
    assert len(engine.complete("The sea<new0>", **how).token_ids) == 3
    grammar = minitri.Grammar("choice", '["<new11>"]')
    assert set(engine.complete("The sea", grammar=grammar).token_ids) < {*range(320)}
    with refused("token id 321"):
        engine.complete("The sea<new11>")


def test_the_context_of_a_named_model_and_safetensors_win(folder, tmp_path, monkeypatch):
    copy = copy_of(folder, tmp_path / "copy")
    (copy / "pytorch_model.bin").write_bytes(b"")
    located = Located("llama-68m", copy)
    monkeypatch.setattr("minitri.files.open_models.locate", lambda *_, **__: located)
    assert load(copy).config.context_length != 2048
    assert load("llama-68m").config.context_length == 2048


def test_compiled_kernels_run_all_weights_in_bfloat16_and_the_drafter(folder, tmp_path):
    """Half the memory of float32 is read for each token, also where PyTorch has no bfloat16."""
    for path in (folder, as_gguf(folder, tmp_path / "it.gguf", kind="Q8_0")):
        models = minitri.load(str(path), draft=str(folder), device="cpu").models
        assert models.target.dtype == models.draft.dtype == torch.bfloat16


def test_all_parts_of_a_split_gguf_file_are_read_from_any_of_them(folder, tmp_path):
    as_gguf(folder, tmp_path / "x.gguf", max_tensors=9)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    for part in parts:
        assert torch.equal(logits(load(part)), logits(load(folder)))
    alone = shutil.copy(parts[1], tmp_path / "alone.gguf")
    with refused("one of 3 parts", "-00003-of-00003.gguf"):
        load(alone)
    last = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with refused("parts are of different files"):
        load(parts[0])
    parts[2].write_bytes(last)
    as_gguf(folder, tmp_path / "y.gguf", max_tensors=12)
    shutil.copy(tmp_path / "y-00002-of-00002.gguf", parts[1])
    with refused("parts are of different files"):
        load(parts[0])
    parts[0].unlink()
    with refused("one of 3 parts", f"no {parts[0].name}"):
        load(parts[2])


def test_rope_scaling_stretches_the_trained_context(folder):
    config = Folder(folder).config("tiny")
    for text, kind, context in (("linear:2.5", "linear", 1280), ("yarn:4", "yarn", 2048)):
        config = stretch_rope(config, text)
        assert (config.rope.kind, config.context_length) == (kind, context)
    for text in ("yarn", "yarn:", "yarn:0.5", "yarn:nan", "dynamic:2", "default:2", "longrope:2"):
        with refused(f"rope_scaling='{text}'"):
            stretch_rope(config, text)
