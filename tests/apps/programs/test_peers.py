"""`tools.bench --compare --peer`: what can run takes part in its own process, or is skipped."""

import os
from itertools import islice
from pathlib import Path

import pytest

from minitri import load
from minitri.files.hf_folder import Folder
from tests.conftest import byte_level_tokenizer
from tests.files.gguf_writer import write_gguf
from tools.bench.peers.choice import find_peers
from tools.bench.peers.float16 import as_float16
from tools.bench.peers.in_transformers import transformers_model, transformers_peer

STAND_IN = """
__version__ = "1.2.3"
class Llama:
    def __init__(self, weights, n_ctx, **options):
        print("a library that talks")
        {loading}
    def generate(self, prompt, **sampling):
        assert sampling["temp"] == 0
        while True:
            yield len(prompt)
"""
LLAMA_CPP = "llama.cpp f16/f16"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a stand-in for llama.cpp where every new process finds it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "llama_cpp.py"
    return lambda loading: file.write_text(STAND_IN.format(loading=loading))


@pytest.fixture(scope="session")
def gguf_file(folder, tmp_path_factory) -> Path:
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    file = tmp_path_factory.mktemp("gguf") / "q8.gguf"
    return write_gguf(file, config, byte_level_tokenizer(), weights, kind="Q8_0")


def peers_of(path: Path, *wanted: str) -> dict:
    engine = load(str(path), dtype="float32", device="cpu")
    return find_peers(path, engine, wanted, {})


def test_a_peer_runs_in_its_own_process(installed, gguf_file):
    installed("")
    peers = peers_of(gguf_file, LLAMA_CPP)
    assert list(islice(peers[LLAMA_CPP]([5] * 40, 9), 3)) == [40] * 3


def test_a_peer_that_dies_is_skipped(installed, gguf_file, caplog):
    installed("import os; os._exit(3)")
    with caplog.at_level("INFO", "minitri"):
        assert peers_of(gguf_file, LLAMA_CPP) == {}
    reason = "skipped: llama.cpp ended with exit code 3"
    assert caplog.messages[-1].startswith(f"{LLAMA_CPP}: {reason}")


def test_other_weights_and_programs_say_what_minitri_says(folder, gguf_file):
    """A GGUF file as f16, and `transformers`."""
    pytest.importorskip("transformers")
    prompt = [5, 6, 7, 8] * 10
    texts, engines = [], []
    for path in (gguf_file, as_float16(gguf_file), folder):
        engines.append(load(str(path), dtype="float32", device="cpu"))
        texts.append(engines[-1].complete(prompt, max_new_tokens=20, ignore_eos=True).token_ids)
    assert texts[0] == texts[1]
    peer = transformers_peer(transformers_model(folder, engines[2]))
    assert tuple(peer(prompt, 20)) == texts[2]
