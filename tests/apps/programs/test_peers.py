"""`tools.bench --compare --peer`: what can run takes part in its own process, or is skipped."""

import os
from itertools import islice
from pathlib import Path

import pytest

from minitri import load
from minitri.files.hf_folder import Folder
from tests.conftest import byte_level_tokenizer
from tests.files.gguf_writer import write_gguf
from tools.bench.peers.choice import PEERS, find_peers
from tools.bench.peers.float16 import as_float16
from tools.bench.peers.in_transformers import transformers_model, transformers_peer

STAND_IN = """
__version__ = "1.2.3"
class Llama:
    def __init__(self, weights, n_ctx, **options):
        print("a library that talks")
    def generate(self, prompt, **sampling):
        assert sampling["temp"] == 0
        while True:
            yield len(prompt)
"""
LLAMA_CPP = "llama.cpp f16/f16"


@pytest.fixture
def gguf_file(folder, tmp_path) -> Path:
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    return write_gguf(tmp_path / "q8.gguf", config, byte_level_tokenizer(), weights, kind="Q8_0")


def test_a_peer_runs_in_its_own_process(gguf_file, engine, caplog, tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(STAND_IN)
    (tmp_path / "openvino_genai.py").write_text("raise ImportError('built for\\nanother machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with caplog.at_level("INFO", "minitri"):
        peers = find_peers(gguf_file, engine, PEERS[1:], {})
    assert list(peers) == [LLAMA_CPP]
    assert list(islice(peers[LLAMA_CPP]([5] * 40, 9), 3)) == [40] * 3
    assert any(line.startswith(f"{LLAMA_CPP} 1.2.3, run by ") for line in caplog.messages)
    missing = [line for line in caplog.messages if line.startswith("openvino")]
    assert [line.partition(":")[0] for line in missing] == [n for n in PEERS if "openvino" in n]
    assert all("ImportError: built for another machine" in line for line in missing)


def test_other_weights_and_programs_say_what_minitri_says(folder, engine, gguf_file):
    """A GGUF file as f16, and `transformers`."""
    prompt = [5, 6, 7, 8] * 10

    def greedy(engine) -> list[int]:
        return [*engine.complete(prompt, max_new_tokens=20, ignore_eos=True).token_ids]

    files = (gguf_file, as_float16(gguf_file))
    ours, as_f16 = (greedy(load(file, dtype="float32", device="cpu")) for file in files)
    assert ours == as_f16
    peer = transformers_peer(transformers_model(folder, engine))
    assert [*peer(prompt, 20)] == greedy(engine)
