"""`tools.bench --compare --peer`: what can run takes part in its own process, or is skipped."""

import os
from itertools import islice
from pathlib import Path

import pytest

from minitri import GenerationConfig, load
from minitri.files.hf_folder import Folder
from tests.conftest import byte_level_tokenizer
from tests.files.gguf_writer import write_gguf
from tools.bench import __main__ as bench
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
def install(tmp_path, monkeypatch):
    """Puts a package where every new process finds it."""

    def install(name: str, source: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return install


@pytest.fixture
def gguf_file(folder, tmp_path) -> Path:
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    return write_gguf(tmp_path / "q8.gguf", config, byte_level_tokenizer(), weights, kind="Q8_0")


def test_a_peer_runs_in_its_own_process(install, gguf_file, caplog):
    install("llama_cpp", STAND_IN)
    install("openvino_genai", "raise ImportError('built for\\nanother machine')")
    with caplog.at_level("INFO", "minitri"):
        engine = load(str(gguf_file), dtype="float32", device="cpu")
        peers = find_peers(gguf_file, engine, PEERS[1:], {})
    assert list(peers) == [LLAMA_CPP]
    assert list(islice(peers[LLAMA_CPP]([5] * 40, 9), 3)) == [40] * 3
    assert any(line.startswith(f"{LLAMA_CPP} 1.2.3, run by ") for line in caplog.messages)
    missing = [line for line in caplog.messages if line.startswith("openvino")]
    assert [line.partition(":")[0] for line in missing] == [n for n in PEERS if "openvino" in n]
    assert all("ImportError: built for another machine" in line for line in missing)


def test_a_peer_is_one_of_the_contestants(install, gguf_file, call):
    install("llama_cpp", STAND_IN)
    flags = f"--compare --model {gguf_file} --method autoregressive --prompt-tokens 30 "
    flags += "--new-tokens 12 --dtype float32 --device cpu --temperature 0 --peer llama.cpp --json"
    rows = call(bench.main, *flags.split()).json["contestants"]
    assert set(rows) == {"autoregressive", LLAMA_CPP}
    assert rows[LLAMA_CPP]["ms_per_token"]["median"] > 0


def test_other_weights_and_programs_say_what_minitri_says(folder, gguf_file):
    """A GGUF file as f16, and `transformers`."""
    pytest.importorskip("transformers")
    prompt = [5, 6, 7, 8] * 10

    def greedy(path: Path) -> list[int]:
        engine = load(path, dtype="float32", device="cpu")
        generation = GenerationConfig(20, ignore_eos=True)
        return [*engine.complete(prompt, generation=generation).token_ids]

    assert greedy(gguf_file) == greedy(as_float16(gguf_file))
    engine = load(str(folder), dtype="float32", device="cpu")
    peer = transformers_peer(transformers_model(folder, engine))
    assert list(peer(prompt, 20)) == greedy(folder)
