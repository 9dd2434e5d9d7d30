"""Every format loads to the same model, and every way in which files can be bad is named in one
line."""

import json
import os
import pickle
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import minitri
from minitri.config import ModelConfig, RopeConfig
from minitri.errors import InputError
from minitri.loading.checkpoint import open_checkpoint
from minitri.loading.fetch import Located
from minitri.loading.gguf.file import GgufFile, hugging_face_name
from minitri.loading.hf_config import stretch_rope
from minitri.loading.hf_folder import Folder, read_json, weight_files
from minitri.model.rope import rope_frequencies
from tests.conftest import byte_level_tokenizer, edit_json, new_cache
from tests.loading.gguf_writer import PARTS, write_gguf

TOKENS = torch.randint(0, 320, (1, 20), generator=torch.Generator().manual_seed(0))


def load(path) -> minitri.Engine:
    return minitri.load(str(path), dtype="float32", device="cpu")


def logits(engine: minitri.Engine) -> torch.Tensor:
    model = engine.model
    return model.logits(model(TOKENS, torch.arange(20).unsqueeze(0), new_cache(model.config)))


def copy_without_weights(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """The tiny model in a folder that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def sharded(folder: Path, target: Path, *, pickled: bool) -> Path:
    """The same weights in three shards with an index."""
    copy_without_weights(folder, target)
    weights = load_file(folder / "model.safetensors")
    ending, save = ("bin", torch.save) if pickled else ("safetensors", save_file)
    stem = "pytorch_model" if pickled else "model"
    names = sorted(weights)
    weight_map = {name: f"{stem}-{1 + i % 3:05d}-of-00003.{ending}" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save({name: weights[name] for name in names if weight_map[name] == shard}, target / shard)
    (target / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


@pytest.mark.parametrize(
    "layout", ["one .bin", "old .bin", "sharded .bin", "sharded safetensors", "file path", "gguf"]
)
def test_every_format_loads_to_the_same_model(layout, folder, tmp_path):
    wanted, target = logits(load(folder)), tmp_path / "model"
    if layout.startswith("sharded"):
        sharded(folder, target, pickled=layout.endswith(".bin"))
    elif layout.endswith(".bin"):
        copy_without_weights(folder, target)
        weights = load_file(folder / "model.safetensors")
        torch.save(
            weights,
            target / "pytorch_model.bin",
            _use_new_zipfile_serialization=layout != "old .bin",
        )
    elif layout == "file path":
        target = folder / "model.safetensors"
    else:
        target = tmp_path / "tiny.gguf"
        config = Folder(folder).config("tiny")
        write_gguf(target, config, byte_level_tokenizer(), dict(Folder(folder).tensors(config)))
    assert torch.equal(logits(load(target)), wanted)


def test_a_quantized_gguf_is_the_dequantized_model(folder, tmp_path):
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    path = write_gguf(tmp_path / "q8.gguf", config, byte_level_tokenizer(), weights, kind="Q8_0")
    difference = (logits(load(path)) - logits(load(folder))).abs().max()
    assert 0 < difference < 0.5


def test_gguf_names_are_translated_both_ways():
    for ours, theirs in PARTS.items():
        assert hugging_face_name(f"blk.7.{theirs}.weight") == f"model.layers.7.{ours}.weight"
    assert hugging_face_name("something.else") == "something.else"


def gguf_with(path: Path, folder: Path, add) -> GgufFile:
    """The tiny model as GGUF, with metadata or tensors that `add` puts into the writer."""
    config = Folder(folder).config("tiny")
    return GgufFile(
        write_gguf(
            path, config, byte_level_tokenizer(), dict(Folder(folder).tensors(config)), add=add
        )
    )


def test_gguf_yarn_arrives(folder, tmp_path):
    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = gguf_with(tmp_path / "yarn.gguf", folder, add).config("x").rope
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 4.0, 128)


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_gguf_factor_without_a_type_is_linear_scaling(folder, tmp_path, key):
    rope = (
        gguf_with(tmp_path / "x.gguf", folder, lambda writer: writer.add_float32(key, 4.0))
        .config("x")
        .rope
    )
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_gguf_divisors_are_llama3_scaling(folder, tmp_path):
    """llama.cpp stores llama3 scaling as a tensor of divisors; the result must be the formula's."""
    llama3 = RopeConfig(kind="llama3", factor=8.0, original_context=64)
    plain, _ = rope_frequencies(RopeConfig(), 16)
    divisors = (plain / rope_frequencies(llama3, 16)[0]).numpy()
    file = gguf_with(
        tmp_path / "x.gguf", folder, lambda writer: writer.add_tensor("rope_freqs.weight", divisors)
    )
    config = file.config("x")
    assert torch.allclose(rope_frequencies(config.rope, 16)[0], rope_frequencies(llama3, 16)[0])
    assert "stored divisors" in config.rope.describe()
    assert sum(1 for _ in file.tensors(config)) == 21
    with pytest.raises(InputError, match="brings a stretched RoPE of its own"):
        stretch_rope(config, "yarn:4")


def test_gguf_end_of_turn_ends_too(folder, tmp_path):
    file = gguf_with(tmp_path / "x.gguf", folder, lambda writer: writer.add_eot_token_id(7))
    assert file.config("x").eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.rope.dimension_count", 8, "rotates only a part of each head"),
        ("llama.expert_count", 4, "mixture of experts"),
        ("llama.rope.freq_base", "wide", "its hyper-parameters are damaged"),
        ("tokenizer.ggml.eot_token_id", "x", "no whole number"),
        ("tokenizer.ggml.pre", "martian", "cuts words in the way 'martian'"),
        ("tokenizer.ggml.model", "wordpiece", "tokenizer of type 'wordpiece'"),
        ("tokenizer.ggml.merges", 3, "its tokenizer's tables are damaged"),
    ],
)
def test_gguf_metadata_that_cannot_run_is_one_line(folder, tmp_path, key, value, match):
    def add(writer):
        writer.kv_data[0].pop(key, None)
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)

    path = tmp_path / "x.gguf"
    gguf_with(path, folder, add)
    with pytest.raises(InputError, match=match) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_tied_heads_stored_all_the_same_and_old_rotary_buffers_are_passed_over(folder, tmp_path):
    from tests.conftest import write_hf_folder

    tied = write_hf_folder(tmp_path / "tied", tie_word_embeddings=True)
    wanted = logits(load(tied))
    weights = load_file(tied / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(320, 64)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, tied / "model.safetensors")
    assert torch.equal(logits(load(tied)), wanted)


def test_generation_config_decides_the_end_tokens(copy):
    edit_json(copy / "generation_config.json", eos_token_id=[2, 7])
    assert load(copy).config.eos_token_ids == (2, 7)
    edit_json(copy / "generation_config.json", eos_token_id=None)
    assert load(copy).config.eos_token_ids == (2,)


def test_the_context_of_a_named_model_wins(folder, monkeypatch):
    located = Located("tiny", folder, context=1234)
    monkeypatch.setattr("minitri.loading.open_models.locate", lambda *_, **__: located)
    assert load("tiny").config.context_length == 1234


class TestBadFiles:
    """Each gives one line: what, what was got, what to do."""

    def refused(self, path, match: str) -> None:
        with pytest.raises(InputError, match=match) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert ";" in str(caught.value)

    def spoil(self, copy: Path, change) -> None:
        weights = load_file(copy / "model.safetensors")
        change(weights)
        save_file(weights, copy / "model.safetensors")

    def test_missing_tensor(self, copy):
        self.spoil(copy, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
        self.refused(copy, r"lacks 1 tensors: model.layers.1.mlp.up_proj.weight")

    def test_unexpected_tensor(self, copy):
        self.spoil(
            copy,
            lambda weights: weights.update(
                {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
            ),
        )
        self.refused(copy, r"has unexpected 1 tensors: model.layers.0.self_attn.q_proj.bias")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
    def test_weights_that_are_not_floating_point(self, copy, dtype):
        self.spoil(
            copy, lambda weights: weights.update({"model.norm.weight": torch.ones(64, dtype=dtype)})
        )
        self.refused(
            copy, "model.norm.weight holds torch.* values .*, not plain floating-point weights"
        )

    def test_end_tokens_of_generation_config(self, copy):
        edit_json(copy / "generation_config.json", eos_token_id=["x"])
        self.refused(copy, "no whole number")

    def test_json_nested_without_end(self, copy):
        (copy / "config.json").write_text("[" * 200_000)
        self.refused(copy, "is not readable JSON")

    def test_a_device_instead_of_a_file(self):
        self.refused("/dev/null", "neither a folder nor a regular file")

    def test_wrong_shape(self, copy):
        self.spoil(copy, lambda weights: weights.update({"model.norm.weight": torch.ones(63)}))
        self.refused(copy, r"model.norm.weight has shape \(63,\) but the config asks for \(64,\)")

    def test_no_weights(self, folder, tmp_path):
        self.refused(
            copy_without_weights(folder, tmp_path / "empty"),
            "has no weights; expected model.safetensors",
        )

    def test_missing_shard(self, folder, tmp_path):
        target = sharded(folder, tmp_path / "model", pickled=True)
        (target / "pytorch_model-00002-of-00003.bin").unlink()
        self.refused(target, "lacks the shard 'pytorch_model-00002-of-00003.bin'")

    def test_shard_outside_the_folder(self, folder, tmp_path):
        target = sharded(folder, tmp_path / "model", pickled=False)
        edit_json(
            target / "model.safetensors.index.json", weight_map={"x": "../../secret.safetensors"}
        )
        self.refused(target, "points outside its folder")

    @pytest.mark.parametrize("keep", [0, 4, 1000, -1])
    def test_truncated_safetensors(self, copy, keep):
        file = copy / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        self.refused(copy, "is damaged or cut short")

    @pytest.mark.parametrize("keep", [0, 100, 5000, -1])
    def test_truncated_bin(self, folder, tmp_path, keep):
        target = copy_without_weights(folder, tmp_path / "model")
        file = target / "pytorch_model.bin"
        torch.save(load_file(folder / "model.safetensors"), file)
        file.write_bytes(file.read_bytes()[:keep])
        self.refused(target, "damaged or cut short|more than tensors")

    @pytest.mark.parametrize("keep", [2, 100, 20000, -4000])
    def test_truncated_gguf(self, folder, tmp_path, keep):
        config = Folder(folder).config("tiny")
        file = write_gguf(
            tmp_path / "t.gguf",
            config,
            byte_level_tokenizer(),
            dict(Folder(folder).tensors(config)),
        )
        file.write_bytes(file.read_bytes()[:keep])
        self.refused(file, "is not a whole GGUF file")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_pickle_with_code_is_refused_and_not_run(self, folder, tmp_path, zipped):
        target = copy_without_weights(folder, tmp_path / "model")

        class Trap:
            def __reduce__(self):
                return (os.system, (f"touch {tmp_path}/executed",))

        with (target / "pytorch_model.bin").open("wb") as file:
            if zipped:
                torch.save({"weights": Trap()}, file)
            else:
                pickle.dump({"weights": Trap()}, file)
        self.refused(target, "could run code; nothing was run|damaged or cut short")
        assert not (tmp_path / "executed").exists()

    def test_training_state(self, folder, tmp_path):
        target = copy_without_weights(folder, tmp_path / "model")
        torch.save({"model": {}, "step": 3}, target / "pytorch_model.bin")
        self.refused(target, "not a dictionary of tensors")

    def test_no_config(self, copy):
        (copy / "config.json").unlink()
        self.refused(copy, "has no config.json")

    def test_damaged_config(self, copy):
        (copy / "config.json").write_text('{"model_type": "lla')
        self.refused(copy, "not readable JSON")

    def test_config_that_is_no_object(self, copy):
        (copy / "config.json").write_text("[]")
        self.refused(copy, "holds a list, not a JSON object")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"model_type": "gpt2"}, "is a 'gpt2' model; use one of a kind that minitri runs"),
            ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
            ({"mlp_bias": True}, "mlp_bias=True"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
            ({"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
            ({"hidden_size": "wide"}, "value of the wrong kind"),
            ({"num_hidden_layers": 0}, "num_layers is "),
            ({"num_key_value_heads": 3}, "must be a multiple"),
            (
                {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
                "RoPE kind is 'dynamic'",
            ),
            ({"rope_parameters": {"rope_type": "linear"}}, "RoPE type 'linear' has no factor"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only a part of each head"),
            ({"tie_word_embeddings": "false"}, "where true or false belongs"),
            ({"eos_token_id": "</s>"}, "token id '</s>', which is no whole number"),
            ({"bos_token_id": 1.5}, "token id 1.5, which is no whole number"),
            ({"vocab_size": 2 * 10**9}, "do not fit on cpu"),
        ],
    )
    def test_config_that_cannot_run(self, copy, change, match):
        edit_json(copy / "config.json", **change)
        self.refused(copy, match)

    def test_tokenizer_larger_than_the_vocabulary(self, copy):
        names = ("model.embed_tokens.weight", "lm_head.weight")
        self.spoil(copy, lambda own: own.update({name: own[name][:200] for name in names}))
        edit_json(copy / "config.json", vocab_size=200)
        self.refused(copy, "tokens but the model's vocabulary has 200")


def test_safetensors_win_over_bin(copy):
    (copy / "pytorch_model.bin").write_bytes(b"")
    assert weight_files(copy) == ([copy / "model.safetensors"], {})


def test_open_checkpoint_goes_by_the_ending(folder):
    assert isinstance(open_checkpoint(folder), Folder)
    assert read_json(folder / "config.json")["model_type"] == "llama"


@pytest.mark.parametrize(
    ("text", "kind", "context"),
    [("yarn:4", "yarn", 2048), ("linear:2.5", "linear", 1280), ("none", "default", 512)],
)
def test_rope_scaling_stretches_the_context(folder, text, kind, context):
    config = stretch_rope(Folder(folder).config("tiny"), text)
    assert (config.rope.kind, config.context_length) == (kind, context)
    assert config.rope.theta == 10000.0


def test_rope_scaling_counts_from_the_trained_context(folder):
    config = stretch_rope(Folder(folder).config("tiny"), "yarn:4")
    assert stretch_rope(config, "yarn:2").context_length == 1024


@pytest.mark.parametrize(
    "text", ["yarn", "yarn:", "yarn:0.5", "yarn:nan", "yarn:1e9", "dynamic:2", "default:2", ""]
)
def test_nonsense_rope_scaling_is_refused(text):
    config = ModelConfig(1, 8, 8, 1, 1, 8, 8, 8)
    with pytest.raises(InputError, match="is not KIND:FACTOR"):
        stretch_rope(config, text)
