"""Files that a careless or hostile author makes: each gives one line, or the model that it says.

None may hang, eat memory, end in a traceback, or run as something else than what is written in it.
"""

import json
import os
import resource
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minitri.config import RopeConfig
from minitri.errors import InputError
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_config import read_config
from minitri.loading.hf_folder import Folder
from tests.conftest import byte_level_tokenizer, edit_json
from tests.loading.gguf_writer import write_gguf
from tests.loading.test_checkpoint import copy_without_weights, load, logits, sharded


def refused(path: Path, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def yarn(**changes):
    return {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, **changes}}


def llama3(**changes):
    return {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, **changes}}


WRONG_VALUES = [
    ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5 where a whole number belongs"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0 where a whole number belongs"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True where a whole number"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2' where a whole number"),
    ({"num_hidden_layers": 10**6}, "num_layers is "),
    ({"num_key_value_heads": 0}, "num_kv_heads is "),
    ({"num_key_value_heads": False}, "num_key_value_heads is False"),
    ({"num_attention_heads": 0}, "num_heads is "),
    ({"head_dim": 0}, "head_dim is "),
    ({"head_dim": []}, r"head_dim is \[\] where"),
    ({"max_position_embeddings": 0}, "context_length is "),
    ({"max_position_embeddings": 10**20}, "context_length is "),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is "),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is "),
    ({"rms_norm_eps": 1e30}, "rms_norm_eps is "),
    ({"rms_norm_eps": 0}, "rms_norm_eps is "),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps is "),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5' where a number belongs"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0 where true or false"),
    ({"rope_parameters": None, "rope_theta": 0}, "RoPE theta is "),
    ({"rope_parameters": None, "rope_theta": False}, "rope_theta is False where a number"),
    ({"rope_parameters": {"rope_theta": 0}}, "RoPE theta is "),
    ({"rope_parameters": {"rope_type": "", "factor": 1}}, "RoPE kind is ''"),
    ({"rope_parameters": {"rope_type": "a\nb", "factor": 1}}, "RoPE kind is"),
    ({"rope_parameters": 0}, "rope_parameters is 0 where an object belongs"),
    ({"rope_parameters": {"partial_rotary_factor": 0}}, "only a part of each head"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "RoPE factor is "),
    ({"rope_scaling": {"type": "linear", "factor": 1e-30}}, "RoPE factor is "),
    ({"rope_scaling": {"type": "linear", "factor": 0.99}}, "RoPE factor is "),
    ({"rope_scaling": {"type": "linear", "factor": 1e30}}, "RoPE factor is "),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2' where a number"),
    (yarn(attention_factor=0), "RoPE attention_factor is "),
    (yarn(attention_factor=-1.0), "RoPE attention_factor is "),
    (yarn(attention_factor=float("inf")), "RoPE attention_factor is "),
    (yarn(beta_fast=1, beta_slow=32), "RoPE beta_fast is "),
    (yarn(beta_fast=0.5), "RoPE beta_fast is "),
    (yarn(original_max_position_embeddings=0), "RoPE original_context is "),
    (yarn(original_max_position_embeddings=1.5), "embeddings is 1.5 where a whole number"),
    (yarn(truncate="no"), "truncate is 'no' where true or false"),
    (yarn(mscale=0), "uses mscale"),
    (llama3(low_freq_factor=4.0, high_freq_factor=4.0), "RoPE high_freq_factor is "),
    (llama3(low_freq_factor=8.0), "RoPE high_freq_factor is "),
]


@pytest.mark.parametrize(("change", "match"), WRONG_VALUES, ids=lambda value: str(value)[:60])
def test_a_wrong_value_of_a_config_is_refused_and_never_replaced(folder, change, match):
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(InputError, match=match) as caught:
        read_config(config | change, "tiny")
    assert "\n" not in str(caught.value)


def test_null_is_as_good_as_absent(copy):
    wanted = load(copy).config
    config = json.loads((copy / "config.json").read_text())
    config |= {"head_dim": None, "rope_scaling": None, "attention_bias": None}
    (copy / "config.json").write_text(json.dumps(config))
    assert load(copy).config == wanted


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_divisors_must_be_positive(value):
    with pytest.raises(InputError, match="RoPE frequency_divisors is"):
        RopeConfig(frequency_divisors=(1.0, value))


SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "name", [*SMALL_FILES, "model.safetensors", "model.safetensors.index.json"]
)
def test_a_pipe_in_place_of_a_file_is_not_opened(copy, name):
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    refused(copy, "no regular file|has no weights|has no tokenizer")


def test_a_pipe_in_place_of_a_shard_is_not_opened(folder, tmp_path):
    target = sharded(folder, tmp_path / "model", pickled=False)
    shard = target / "model-00002-of-00003.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    refused(target, "lacks the shard 'model-00002")


@pytest.mark.parametrize(
    ("shard", "match"),
    [
        ("x" * 5000, "lacks the shard 'xxx"),
        ("a\nb", r"lacks the shard 'a\\nb'"),
        ("\ud800", "lacks the shard"),
        ("a\0b", "lacks the shard"),
        ("", "lacks the shard ''"),
        (5, "points outside its folder, to 5"),
        (["x"], "points outside its folder"),
        ({}, "points outside its folder"),
        (None, "points outside its folder"),
        ("..", "points outside its folder|lacks the shard"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_an_index_that_names_no_file_is_one_short_line(folder, tmp_path, shard, match):
    target = sharded(folder, tmp_path / "model", pickled=False)
    edit_json(target / "model.safetensors.index.json", weight_map={"model.norm.weight": shard})
    refused(target, match)


@pytest.mark.parametrize("other", ["model-00001-of-00003", "model-00003-of-00003"])
def test_the_index_decides_which_of_two_tensors_is_meant(folder, tmp_path, other):
    target, wanted = sharded(folder, tmp_path / "model", pickled=False), logits(load(folder))
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    right = "model-00002-of-00003.safetensors"
    name = next(name for name in index if index[name] == right)
    extra = load_file(target / f"{other}.safetensors")
    extra[name] = torch.zeros_like(load_file(target / right)[name])
    save_file(extra, target / f"{other}.safetensors")
    assert torch.equal(logits(load(target)), wanted)
    kept = load_file(target / right)
    del kept[name]
    save_file(kept, target / right)
    refused(target, f"lacks 1 tensors: {name}")


def test_a_tensor_that_the_index_does_not_know_may_not_come_twice(folder, tmp_path):
    target = sharded(folder, tmp_path / "model", pickled=False)
    file = target / "model.safetensors.index.json"
    index = json.loads(file.read_text())["weight_map"]
    name = next(name for name in index if index[name].startswith("model-00002"))
    del index[name]
    file.write_text(json.dumps({"weight_map": index}))
    assert load(target).config.num_layers == 2
    extra = load_file(target / "model-00001-of-00003.safetensors")
    extra[name] = load_file(target / "model-00002-of-00003.safetensors")[name]
    save_file(extra, target / "model-00001-of-00003.safetensors")
    refused(target, f"has unexpected 1 tensors: {name}")


def test_the_name_of_an_unexpected_tensor_stays_in_one_line(copy):
    weights = load_file(copy / "model.safetensors")
    save_file(weights | {"a\nb" * 200: torch.zeros(1)}, copy / "model.safetensors")
    refused(copy, "has unexpected 1 tensors: a ba ba b")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_of_parameters_is_a_model(folder, tmp_path, zipped):
    target = copy_without_weights(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    file = target / "pytorch_model.bin"
    torch.save(parameters, file, _use_new_zipfile_serialization=zipped)
    assert torch.equal(logits(load(target)), logits(load(folder)))


@pytest.mark.parametrize("value", ["false", "true", 0, 1, []])
def test_add_bos_token_is_true_or_false(copy, value):
    (copy / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": value}))
    refused(copy, "tokenizer_config.json holds a wrong value .*where true or false belongs")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_an_empty_tokenizer_is_refused(copy, name):
    (copy / "tokenizer.json").unlink()
    (copy / name).write_bytes(b"")
    refused(copy, "damaged|has 0 tokens")


class TestGguf:
    """Headers of GGUF files."""

    def write(self, folder: Path, path: Path, add=None, change=None, **options) -> Path:
        config = Folder(folder).config("tiny")
        weights = dict(Folder(folder).tensors(config))
        if change is not None:
            change(weights)
        return write_gguf(path, config, byte_level_tokenizer(), weights, add=add, **options)

    def divisors(self, values):
        array = np.array(values, dtype=np.float32)
        return lambda writer: writer.add_tensor("rope_freqs.weight", array)

    @pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
    def test_divisors_that_are_not_positive(self, folder, tmp_path, value):
        add = self.divisors([1.0] * 7 + [value])
        refused(self.write(folder, tmp_path / "x.gguf", add), "RoPE frequency_divisors is")

    def test_divisors_for_another_head(self, folder, tmp_path):
        path = self.write(folder, tmp_path / "x.gguf", self.divisors([1.0] * 7))
        refused(path, "has RoPE divisors of type F32 and shape .7,. for a head of 16")

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [
            ("llama.rope.freq_base", 0.0, "RoPE theta is "),
            ("llama.rope.scaling.factor", 0.0, "RoPE factor is "),
            ("llama.rope.scaling.attn_factor", 0.0, "sets rope.scaling.attn_factor"),
            ("llama.rope.scaling.yarn_ext_factor", 0.5, "sets rope.scaling.yarn_ext_factor"),
            ("llama.rope.dimension_count", 0, "rotates only a part"),
            ("llama.attention.head_count_kv", 0, "num_kv_heads is "),
            ("llama.attention.key_length", 0, "head_dim is "),
            ("llama.block_count", 2.0, "block_count|num_hidden_layers is 2.0 where a whole"),
            ("llama.attention.layer_norm_rms_epsilon", float("inf"), "rms_norm_eps is "),
            ("tokenizer.ggml.add_bos_token", "false", "'false' where true or false belongs"),
        ],
    )
    def test_metadata_that_is_wrong_is_never_replaced(self, folder, tmp_path, key, value, match):
        def add(writer):
            writer.kv_data[0].pop(key, None)
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](key, value)

        refused(self.write(folder, tmp_path / "x.gguf", add), match)

    def test_the_ramp_of_yarn_arrives(self, folder, tmp_path):
        def add(writer):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
            writer.add_float32("llama.rope.scaling.yarn_beta_slow", 2.0)

        rope = GgufFile(self.write(folder, tmp_path / "x.gguf", add)).config("x").rope
        assert (rope.kind, rope.beta_fast, rope.beta_slow) == ("yarn", 16.0, 2.0)

    def test_an_odd_number_of_query_rows(self, folder, tmp_path):
        original = gguf.GGUFWriter.add_tensor

        def add_tensor(self, name, values, *rest, **options):
            values = values[:63] if name == "blk.0.attn_q.weight" else values
            return original(self, name, np.ascontiguousarray(values), *rest, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
            path = self.write(folder, tmp_path / "x.gguf")
        refused(path, r"q_proj.weight has shape \(63, 64\) but the config asks for \(64, 64\)")

    @pytest.mark.parametrize("kind", ["F16", "Q8_0", "F64", "I8", "Q4_K"])
    @pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_norm.weight", "last"])
    def test_a_tensor_of_another_type_does_not_fit_its_place(self, folder, tmp_path, name, kind):
        path = self.write(folder, tmp_path / "x.gguf")
        tensors = list(GgufFile(path)._tensors)
        name = tensors[-1] if name == "last" else name
        content = bytearray(path.read_bytes())
        at = content.index(name.encode()) + len(name)
        (num_dims,) = struct.unpack_from("<I", content, at)
        struct.pack_into("<I", content, at + 4 + 8 * num_dims, gguf.GGMLQuantizationType[kind])
        path.write_bytes(content)
        refused(path, "is not a whole GGUF file .*(does not fit|left after|bytes are needed)")

    @pytest.mark.parametrize("kind", ["I32"])
    def test_a_tensor_of_integers_is_no_weight(self, folder, tmp_path, kind):
        path = self.write(folder, tmp_path / "x.gguf")
        content = bytearray(path.read_bytes())
        at = content.index(b"token_embd.weight") + len("token_embd.weight") + 20
        struct.pack_into("<I", content, at, gguf.GGMLQuantizationType[kind])
        path.write_bytes(content)
        refused(path, "of type I32 cannot be dequantized")

    @pytest.mark.parametrize("element", [0, 4, 7, 9, 12, 77])
    @pytest.mark.parametrize("count", [None, 10**7, 2**63])
    def test_tokens_of_another_type_cost_no_memory(self, folder, tmp_path, element, count):
        """The array of texts relabelled, with its own count or another, before 30 MB of zeros."""
        path = self.write(folder, tmp_path / "x.gguf")
        content = bytearray(path.read_bytes())
        at = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
        assert struct.unpack_from("<II", content, at) == (9, 8)
        struct.pack_into("<I", content, at + 4, element)
        if count is not None:
            struct.pack_into("<Q", content, at + 8, count)
        path.write_bytes(content + bytes(30_000_000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(path, "is not a whole GGUF file")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB

    def test_a_token_that_is_there_twice(self, folder, tmp_path):
        path = self.write(folder, tmp_path / "x.gguf")
        content = path.read_bytes()
        length = (4).to_bytes(8, "little")
        assert content.count(length + b"</s>") == 1
        path.write_bytes(content.replace(length + b"</s>", length + "Ġth".encode()))
        assert load(path).tokenizer.token(2) == "Ġth"
        path.write_bytes(content.replace(length + b"</s>", length + "Ġin".encode()))
        refused(path, "1 of 310 tokens are there twice")
