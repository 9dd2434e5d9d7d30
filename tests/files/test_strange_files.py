"""Files of a careless or hostile author: each gives one line, or the model that it says.

None may hang, eat memory or end in a traceback; `test_fuzz.py` tries many more.
"""

import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minitri.files.hf_config import FAMILIES, read_config
from tests.conftest import edit_json, load, refused
from tests.core.rigs import tiny_config
from tests.files.test_checkpoint import as_gguf, copy_of, sharded

CONFIGS = Path(__file__).with_name("wrong_configs.txt").read_text("utf-8")
"""The changed setting, after its model type or kind of RoPE; what the error names; values."""


@pytest.mark.parametrize("line", CONFIGS.strip().splitlines())
def test_a_wrong_value_of_a_config_is_refused_and_never_replaced(folder, line):
    setting, word, values = line.split("  ")
    config = json.loads((folder / "config.json").read_text())
    kind, _, key = setting.rpartition(" ")
    del config["hidden_act"]  # which Gemma calls otherwise
    for value in json.loads(values):
        change = {key: value}
        if kind in (*FAMILIES, "gemma2"):
            change["model_type"] = kind
        elif kind:
            change = {"rope_parameters": {"rope_type": kind, "factor": 2.0} | change}
        with refused(word):
            read_config(config | change, "tiny")


IMPOSSIBLE = [{"num_heads": 3}, {"head_dim": 7}, {"score_scale": 1.0, "unrotated_layers": (0,)}]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=min)
def test_a_config_that_no_model_can_have_is_refused_by_name(changes):
    with refused(f"{min(changes)} is {changes[min(changes)]}"):
        tiny_config(**changes)


NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
FOLDERS = [
    ("do not fit on cpu", "config.json", {"vocab_size": 2 * 10**9}),
    ("head_size", "config.json", {"draft_of": "it"}),
    ("310 tokens but the model's vocabulary has 200", "config.json", {"vocab_size": 200}),
    ("eos_token_ids", "generation_config.json", {"eos_token_id": ["x"]}),
    ("expected tokenizer.json", "tokenizer.json", None),
    ("the tokenizer of", "tokenizer.json", "[" * 200_000),
    ("add_bos_token", "tokenizer_config.json", {"add_bos_token": 1}),
    ("bos_token_id=None", "tokenizer_config.json", {"add_bos_token": True}),
    ("model.safetensors is damaged", "model.safetensors", 9999),
    ("lacks 21 tensors", INDEX, {"weight_map": {}}),
]
SHARDS = ("x" * 5000, "\ud800", "..", 5)
FOLDERS += [("does not list", INDEX, {"weight_map": {NORM: shard}}) for shard in SHARDS]
"""What the error names; a file; its content, settings to change in it, or where it is cut."""


@pytest.mark.parametrize(("word", "name", "content"), FOLDERS)
def test_what_is_wrong_in_a_folder_is_named(folder, tmp_path, word, name, content):
    file = copy_of(folder, tmp_path / "copy") / name
    edit_json(file.with_name("config.json"), bos_token_id=None)
    if name == INDEX:  # which a file with all weights would win over
        file.with_name("model.safetensors").unlink()
    if content is None:
        file.unlink()
    elif isinstance(content, int):
        os.truncate(file, content)
    elif isinstance(content, dict):
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | content))
    else:
        file.write_text(content)
    with refused(word):
        load(file.parent)


class Trap:
    """Makes a file `executed` as it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch executed",)


TENSORS = [
    ("1 unexpected: a ba ba b", {"a\nb" * 200: torch.zeros(1)}),
    (f"{NORM} is torch.int32", {NORM: torch.ones(64, dtype=torch.int32)}),
    (f"{NORM} is no plain tensor", {NORM: torch.ones(64, device="meta")}),
    (f"{NORM} is torch.float32 (1,)", {NORM: torch.ones(1)}),
    ("holds more than tensors", {"x": Trap()}),
]


@pytest.mark.parametrize(("word", "changes"), TENSORS)
def test_a_wrong_pickle_is_named_and_runs_no_code(folder, tmp_path, monkeypatch, word, changes):
    monkeypatch.chdir(tmp_path)
    copy = copy_of(folder, tmp_path / "copy", "*.safetensors")
    weights = load_file(folder / "model.safetensors") | changes
    for save in (torch.save, pickle.dump) if "Trap" in repr(changes) else (torch.save,):
        with (copy / "pytorch_model.bin").open("wb") as file:
            save(weights, file)
        with refused(word):
            load(copy)
    assert not Path("executed").exists()


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_a_missing_shard_is_named_and_a_tensor_that_is_in_two(folder, tmp_path, ending):
    target = sharded(folder, tmp_path / "model", ending)
    first, second, _ = sorted(target.glob(f"*-of-00003.{ending}"))
    shutil.copy(first, second)
    with refused("unexpected"):
        load(target)
    second.unlink()
    with refused(f"'{second.name}'"):
        load(target)


NAMES = ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "x.gguf"]


@pytest.mark.parametrize("name", [*NAMES, INDEX])
def test_a_pipe_in_place_of_a_file_is_not_opened(folder, tmp_path, name):
    copy = copy_of(folder, tmp_path / "copy", name, *["model.safetensors"] * (name == INDEX))
    os.mkfifo(copy / name)
    with refused():
        load(copy / name if name == "x.gguf" else copy)
    (copy / name).unlink()
    (copy / name).symlink_to("gone")
    with refused():
        load(copy / name if name == "x.gguf" else copy)


METADATA = Path(__file__).with_name("wrong_metadata.txt").read_text("utf-8")
"""A key of a GGUF file, or a tensor; its value; what the error names."""


@pytest.mark.parametrize("line", METADATA.splitlines())
def test_metadata_that_cannot_run_is_never_replaced(folder, tmp_path, line):
    key, text, word = line.split("  ")
    value = json.loads(text)
    if isinstance(value, list):
        value = np.array(value, dtype=np.float32)
    path = as_gguf(folder, tmp_path / "x.gguf", changes={key: value})
    with refused(word):
        load(path)


def packed(name: bytes, offset: int, form: str, *numbers: int, more: bytes = b""):
    """Numbers at a distance from the end of a name."""

    def change(data: bytes) -> bytes:
        content = bytearray(data)
        struct.pack_into(f"<{form}", content, data.index(name) + len(name) + offset, *numbers)
        return bytes(content) + more

    return change


TOKENS, TYPE = b"tokenizer.ggml.tokens", gguf.GGMLQuantizationType
END = struct.pack("<Q", 4) + b"</s>"
WHOLE = "whole GGUF file"
GGUF = [
    *((WHOLE, lambda data, n=n: data[:n]) for n in (0, 5000, -1)),
    # The array of texts relabelled as one of numbers, or of arrays.
    *((WHOLE, packed(TOKENS, 4, "IQ", kind, 2**63, more=bytes(30_000_000))) for kind in (0, 9)),
    (WHOLE, packed(TOKENS, 8, "Q", 10**7, more=bytes(30_000_000))),
    (WHOLE, lambda data: data + bytes(32)),
    (WHOLE, packed(b"token_embd.weight", 20, "I", TYPE.F16)),
    (WHOLE, packed(b"blk.1.ffn_norm.weight", 12, "I", TYPE.F64)),
    ("q_proj.weight that is not read", packed(b"attn_q.weight", 20, "I", TYPE.I32)),
    ("a token twice", lambda data: data.replace(END, END[:8] + "Ġin".encode())),
    ("a name twice", lambda data: data.replace(b"blk.1.attn_k", b"blk.1.attn_v")),
    ("a name twice", lambda data: data.replace(b"eos_token_id", b"bos_token_id")),
]


@pytest.mark.parametrize(("word", "damage"), GGUF)
def test_a_damaged_gguf_file_is_named_and_costs_no_memory(folder, tmp_path, word, damage):
    path = as_gguf(folder, tmp_path / "x.gguf")
    path.write_bytes(damage(path.read_bytes()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(word):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
