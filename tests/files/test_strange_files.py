"""Files of a careless or hostile author: each gives one line, or the model that it says.

None may hang, eat memory or end in a traceback.
"""

import itertools
import json
import os
import pickle
import resource
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minitri.core.errors import InputError
from minitri.files.hf_config import read_config
from tests.conftest import edit_json
from tests.files.test_checkpoint import as_gguf, copy_of, load, sharded


def refused(path, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load(path)
    assert str(caught.value).isprintable()
    assert ";" in str(caught.value)


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return copy_of(folder, tmp_path / "copy")


CONFIGS = r"""
num_layers  num_hidden_layers  [null, 2.5, 2.0, true, "2", [2], {}, 0, -1, 1000000]
hidden_size  hidden_size  [null, "wide"]
num_kv_heads  num_key_value_heads  [false, 0]
multiple  num_key_value_heads  [3]
num_heads  num_attention_heads  [0]
head_dim  head_dim  [0, []]
context_length  max_position_embeddings  [0, 100000000000000000000]
rms_norm_eps  rms_norm_eps  [Infinity, NaN, 1e30, 0, -1e-5, "1e-5", 1000000000000000000000000000000]
tie_word_embeddings  tie_word_embeddings  [0, "false"]
a 'gpt2' model  model_type  ["gpt2"]
a \['llama'\] model  model_type  [["llama"]]
hidden_act  hidden_act  ["gelu"]
mlp_bias  mlp_bias  [true, 0]
quantization_config  quantization_config  [{"quant_method": "gptq"}]
partial_rotary_factor  partial_rotary_factor  [0.5]
eos_token_ids  eos_token_id  ["</s>", [-1]]
bos_token_id  bos_token_id  [1.5]
head_size  draft_of  ["it"]
rope_parameters  rope_parameters  [0]
RoPE theta  rope_parameters  [{"rope_theta": 0}]
RoPE theta  linear rope_theta  [0, false]
RoPE kind  yarn rope_type  ["", "a\nb", "dynamic"]
factor  yarn factor  [null, "2"]
RoPE factor  linear factor  [0, 1e-30, 0.99, 1e30]
RoPE attention_factor  yarn attention_factor  [0, -1.0, Infinity]
RoPE beta_fast  yarn beta_fast  [0.5]
RoPE beta_fast  yarn beta_slow  [33]
RoPE original_context  yarn original_max_position_embeddings  [0, 1.5]
truncate  yarn truncate  ["no"]
mscale  yarn mscale  [0]
partial_rotary_factor  yarn partial_rotary_factor  [0]
RoPE high_freq_factor  llama3 low_freq_factor  [4.0, 8.0]
"""
"""What the error names; the changed setting, with the kind of RoPE if it is one of RoPE; values."""


@pytest.mark.parametrize("line", CONFIGS.strip().splitlines())
def test_a_wrong_value_of_a_config_is_refused_and_never_replaced(folder, line):
    match, setting, values = line.split("  ")
    config = json.loads((folder / "config.json").read_text())
    kind, _, key = setting.rpartition(" ")
    for value in json.loads(values):
        change = {key: value}
        if kind == "linear":  # in the older form
            change = {"rope_scaling": {"type": kind, "factor": 2.0} | change}
            change["rope_parameters"] = None
        elif kind:
            change = {"rope_parameters": {"rope_type": kind, "factor": 2.0} | change}
        with pytest.raises(InputError, match=match) as caught:
            read_config(config | change, "tiny")
        assert str(caught.value).isprintable()


JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
NAMES = (*JSON, "model.safetensors", "model.safetensors.index.json", "chat_template.jinja")


def test_a_pipe_in_place_of_a_file_is_not_opened(folder, tmp_path):
    for number, name in enumerate((*NAMES, "x.gguf")):
        copy = copy_of(folder, tmp_path / str(number), name)
        os.mkfifo(copy / name)
        if name == "chat_template.jinja":
            assert load(copy).tokenizer.chat_template is None
        else:
            refused(
                copy / name if name == "x.gguf" else copy, "tokenizer|readable|weights|no config"
            )


BROKEN = [*itertools.product(JSON, ('{"model_type": "lla', "[]", "[" * 200_000, b"\xff"))]
BAD_FILES = [(name, content, f"{name}|tokenizer") for name, content in BROKEN]
BAD_FILES += [(name, None, name) for name in ("config.json", "tokenizer.json")]
BAD_FILES += [
    ("tokenizer_config.json", {"add_bos_token": "true"}, "add_bos_token"),
    ("tokenizer_config.json", {"add_bos_token": 1}, "add_bos_token"),
    ("tokenizer_config.json", {"add_bos_token": True}, "bos_token_id=None"),
    ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5"),
    ("generation_config.json", {"eos_token_id": ["x"]}, "eos_token_ids"),
    ("config.json", {"vocab_size": 2 * 10**9}, "do not fit on cpu"),
    ("config.json", {"draft_of": "a\nb", "head_size": 9}, "is a drafter for a b"),
]
"""Files with another content, without any, or with changed values."""


@pytest.mark.parametrize(("name", "content", "match"), BAD_FILES)
def test_a_wrong_json_file_is_named(copy, name, content, match):
    edit_json(copy / "config.json", bos_token_id=None)
    file = copy / name
    if content is None:
        file.unlink()
    elif isinstance(content, dict):
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | content))
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(copy, match)


NORM = "model.norm.weight"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
BAD_TENSORS = {
    "lacks 1 tensors .*: model.norm.weight": {NORM: None},
    "1 unexpected: a ba ba b": {"a\nb" * 200: torch.zeros(1)},
    f"1 unexpected: {Q_BIAS}": {Q_BIAS: torch.zeros(64)},
    "model.norm.weight is torch.int32": {NORM: torch.ones(64, dtype=torch.int32)},
    "model.norm.weight is no plain tensor": {NORM: torch.ones(64, device="meta")},
    r"model.norm.weight is .*\(1,\) .*\(64,\)": {NORM: torch.ones(1)},
    "model.norm.weight is torch.complex64": {NORM: torch.ones(64, dtype=torch.complex64)},
    "310 tokens but .* 200": {name: torch.zeros(200, 64) for name in TABLES},
}


@pytest.mark.parametrize("match", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(copy, match):
    weights = load_file(copy / "model.safetensors") | BAD_TENSORS[match]
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    (copy / "model.safetensors").unlink()
    torch.save(kept, copy / "pytorch_model.bin")
    edit_json(copy / "config.json", vocab_size=len(weights["lm_head.weight"]))
    refused(copy, match)


@pytest.mark.parametrize(
    "shard",
    ["x" * 5000, "a\nb", "\ud800", "a\0b", "", "..", "../model.safetensors", 5, ["x"], {}, None],
    ids=lambda value: repr(value)[:20],
)
def test_an_index_that_names_no_file_is_one_short_line(folder, tmp_path, shard):
    target = sharded(folder, tmp_path / "model")
    index = target / "model.safetensors.index.json"
    for content in ({"weight_map": {NORM: shard}}, {"weight_map": shard}):
        index.write_text(json.dumps(content))
        refused(target, "index.json does not list|lacks 21 tensors")


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_a_missing_shard_is_named(folder, tmp_path, ending):
    target = sharded(folder, tmp_path / "model", ending)
    shard = next(target.glob(f"*-00002-of-00003.{ending}"))
    shard.unlink()
    refused(target, f"'{shard.name}'")
    os.mkfifo(shard)
    refused(target, f"'{shard.name}'")


@pytest.mark.parametrize("ending", ["safetensors", "bin", "gguf"])
@pytest.mark.parametrize("keep", [0, 4, 100, 1000, 5000, 20000, -4000, -1])
def test_a_file_that_is_cut_short_is_refused(folder, tmp_path, ending, keep):
    target = copy_of(folder, tmp_path / "model", "*.safetensors")
    if ending == "gguf":
        file = as_gguf(folder, target := tmp_path / "x.gguf")
    elif ending == "bin":
        file = target / "pytorch_model.bin"
        torch.save(load_file(folder / "model.safetensors"), file)
    else:
        file = target / "model.safetensors"
        file.write_bytes((folder / file.name).read_bytes())
    file.write_bytes(file.read_bytes()[:keep])
    refused(target, rf"{file.name} is (damaged|not a whole GGUF file)")


class Trap:
    """Runs a command as it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "executed"

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("is_zipped", [True, False])
def test_a_pickle_that_holds_more_than_tensors_is_not_run(folder, tmp_path, is_zipped):
    target = copy_of(folder, tmp_path / "model", "*.safetensors")
    for content in ({"weights": Trap(tmp_path)}, {"model": {}, "step": 3}, [1]):
        with (target / "pytorch_model.bin").open("wb") as file:
            (torch.save if is_zipped else pickle.dump)(content, file)
        refused(target, "pytorch_model.bin is damaged, or holds more")
    torch.save({3: torch.ones(1)}, target / "pytorch_model.bin")
    refused(target, "1 unexpected: 3,")
    assert not (tmp_path / "executed").exists()


def test_there_must_be_weights_and_a_tokenizer(folder, tmp_path):
    refused("/dev/null", "/dev/null has no config.json")
    empty = copy_of(folder, tmp_path / "empty", "*.safetensors")
    refused(empty, "has no weights")
    (empty / "tokenizer.json").unlink()
    refused(empty, "expected tokenizer.json or tokenizer.model")
    for name in ("tokenizer.json", "tokenizer.model"):
        for content in (b"", b"\x00 not a tokenizer"):
            (empty / name).write_bytes(content)
            refused(empty, "tokenizer of .* (damaged|0 tokens)")
        (empty / name).unlink()


METADATA = """
llama.expert_count  4  expert_count=4
llama.attention.sliding_window  4096  sliding_window=4096
llama.rope.dimension_count  8  dimension_count=8
llama.rope.dimension_count  0  dimension_count=0
llama.rope.freq_base  "wide"  RoPE theta is 'wide'
llama.rope.freq_base  0.0  RoPE theta is
llama.rope.scaling.factor  0.0  RoPE factor is
llama.rope.scale_linear  2.0  scale_linear=2.0
llama.rope.scaling.attn_factor  0.0  scaling.attn_factor=0.0
llama.rope.scaling.yarn_ext_factor  0.5  scaling.yarn_ext_factor=0.5
llama.attention.head_count_kv  0  num_kv_heads is
llama.attention.key_length  0  head_dim is
llama.block_count  2.0  num_layers is 2.0
llama.block_count  null  num_layers
llama.attention.layer_norm_rms_epsilon  Infinity  rms_norm_eps is
general.architecture  "gpt2"  a 'gpt2' model
general.architecture  null  a None model
general.alignment  0  whole GGUF file
tokenizer.ggml.add_bos_token  "false"  add_bos_token is 'false'
tokenizer.ggml.eot_token_id  "x"  eos_token_ids
tokenizer.ggml.pre  "martian"  'martian'
tokenizer.ggml.model  "wordpiece"  'wordpiece'
tokenizer.ggml.merges  3  tokenizer .* damaged
tokenizer.ggml.tokens  null  tokenizer.ggml.tokens
"""


class TestGguf:
    """Headers of GGUF files."""

    @pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan, np.inf, None])
    def test_divisors_that_do_not_fit(self, folder, tmp_path, bad):
        array = np.array(7 * [1.0] + [bad] * (bad is not None), dtype=np.float32)
        add = lambda writer: writer.add_tensor("rope_freqs.weight", array)  # noqa: E731
        refused(as_gguf(folder, tmp_path / "x.gguf", add), "RoPE (frequency_)?divisors")

    @pytest.mark.parametrize("line", METADATA.strip().splitlines())
    def test_metadata_that_cannot_run_is_never_replaced(self, folder, tmp_path, line):
        key, text, match = line.split("  ")
        value = json.loads(text)

        def add(writer):
            writer.kv_data[0].pop(key, None)
            kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            if value is not None:
                kinds[type(value)](key, value)

        refused(as_gguf(folder, tmp_path / "x.gguf", add), match)

    def test_an_odd_number_of_query_rows(self, folder, tmp_path, monkeypatch):
        original = gguf.GGUFWriter.add_tensor

        def add_tensor(self, name, values, *rest, **options):
            values = values[:63] if name == "blk.0.attn_q.weight" else values
            return original(self, name, np.ascontiguousarray(values), *rest, **options)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
        refused(as_gguf(folder, tmp_path / "x.gguf"), "q_proj.weight that is not read")

    @pytest.mark.parametrize("kind", ["F16", "Q8_0", "F64", "I8", "Q4_K", "I32"])
    @pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_norm.weight", "last"])
    def test_a_tensor_of_another_type_does_not_fit_its_place(self, folder, tmp_path, name, kind):
        path = as_gguf(folder, tmp_path / "x.gguf")
        name = gguf.GGUFReader(path).tensors[-1].name if name == "last" else name
        content = bytearray(path.read_bytes())
        at = content.index(name.encode()) + len(name)
        (num_dims,) = struct.unpack_from("<I", content, at)
        struct.pack_into("<I", content, at + 4 + 8 * num_dims, gguf.GGMLQuantizationType[kind])
        path.write_bytes(content)
        # Integers have as many bytes as the floats.
        refused(path, "not a whole GGUF file" if kind != "I32" else "tensor .* not read .*I32")

    @pytest.mark.parametrize("element", [0, 4, 7, 9, 12, 77])
    @pytest.mark.parametrize("count", [None, 10**7, 2**63])
    def test_tokens_of_another_type_cost_no_memory(self, folder, tmp_path, element, count):
        """The array of texts relabelled, with its own count or another, before 30 MB of zeros."""
        path = as_gguf(folder, tmp_path / "x.gguf")
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

    def test_a_name_that_is_there_twice(self, folder, tmp_path):
        path = as_gguf(folder, tmp_path / "x.gguf")
        content = path.read_bytes()
        length = (4).to_bytes(8, "little")
        assert content.count(length + b"</s>") == 1
        path.write_bytes(content.replace(length + b"</s>", length + "Ġth".encode()))
        assert load(path).tokenizer.token(2) == "Ġth"
        path.write_bytes(content.replace(length + b"</s>", length + "Ġin".encode()))
        refused(path, "a token twice")
        for old, new in ((b"blk.1.attn_k", b"blk.1.attn_v"), (b"eos_token_id", b"bos_token_id")):
            path.write_bytes(content.replace(old, new))
            refused(path, "a name twice")
