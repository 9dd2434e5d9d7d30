"""`tools.bench people`: what is installed is measured, on files made for it."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import gguf

from minitri import load
from minitri.core.config import ModelConfig
from minitri.files.named_models import MODELS, NamedModel
from tools.bench import __main__ as bench
from tools.bench import random_gguf

STAND_IN = Path(__file__).with_name("stand_in.txt").read_text("utf-8")
FLAGS = "people --model tiny --prompt-tokens 5 --context 12 --new-tokens 4 --threads 1 -q --json"
ENGINES = ("minitri", "llama.cpp", "openvino", "llama.cpp n_batch=8")
SIZES = {"context_length": 256, "vocab_size": 300, "num_heads": 2, "num_kv_heads": 1}
TINY = ModelConfig(2, 256, 256, head_dim=128, **SIZES, name="tiny")


def test_what_is_installed_is_measured_and_the_rest_is_named(call, monkeypatch, tmp_path):
    """Next to an own llama.cpp there is a broken OpenVINO."""
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    (tmp_path / "openvino.py").write_text("raise ImportError('built for\\nanother machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(MODELS, "tiny", NamedModel("", "suffix", TINY))
    monkeypatch.setattr(random_gguf, "weights_folder", lambda: tmp_path)
    flags = [*FLAGS.split(), "--repeats", 1, *(f"--engine={engine}" for engine in ENGINES)]
    code, out, err = call(bench.main, *flags)
    assert code == 0
    figures = json.loads(out)["figures"].popitem()[1]
    assert [*figures] == ["minitri", "llama.cpp"]
    for measured in figures.values():
        assert measured["load, s"][0] > 0
        assert measured["first token, 5 tokens, s"][0] > 0
        assert measured["peak memory, MB"][0] > 5
    [ms] = figures["llama.cpp"]["decode after 12 tokens, ms/token"]
    assert ms > 10
    assert figures["minitri"]["decode after 12 tokens, ms/token"][0] > 0
    missing, wrong = err.splitlines()
    assert "openvino is left out: ImportError: built for another machine; pip install" in missing
    assert re.match("llama.cpp n_batch=8 is left out of .*: ValueError: too much", wrong)


def test_a_random_file_is_mixed_as_llama_cpp_mixes_and_runs(tmp_path):
    """Counts of Qwen2 in 28 layers are those in the file of its makers."""
    options = {"attention_bias": True, "output_bias": False}
    config = ModelConfig(28, 256, 256, head_dim=128, **SIZES, **options)
    random_gguf.write_random(tmp_path / "any.gguf", config)
    tensors = gguf.GGUFReader(tmp_path / "any.gguf").tensors
    found = Counter(tensor.tensor_type.name for tensor in tensors)
    assert {kind: num for kind, num in found.items() if kind != "F32"} == {"Q4_K": 169, "Q6_K": 29}
    engine = load(tmp_path / "any.gguf", device="cpu")
    assert engine.score(list(range(2, 60))).isfinite().all()
