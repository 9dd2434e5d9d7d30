"""`tools.bench --compare --peers`: what can run takes part in its own process, the rest is skipped
with a reason.

Most tests put a package of a few lines in the place of llama-cpp-python: the process, its protocol
and its failures are then those of a real peer.
"""

import importlib.util
import json
import os
import sys
import threading
from itertools import islice
from pathlib import Path

import pytest

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig, load
from minitri.loading.hf_folder import Folder
from tests.cascades import random_prompt
from tests.conftest import byte_level_tokenizer
from tests.loading.gguf_writer import write_gguf
from tools.bench import __main__ as bench
from tools.bench.peers.choice import PEERS, find_peers, peer_names
from tools.bench.peers.float16 import as_float16, is_quantized
from tools.bench.peers.in_transformers import (
    prompt_lookup_peer,
    transformers_model,
    transformers_peer,
)
from tools.bench.peers.process import Worker, worker_peer

STAND_IN = """
import os
__version__ = "1.2.3"
GGML_TYPE_F16, GGML_TYPE_Q8_0 = "f16", "q8_0"
LLAMA_ROPE_SCALING_TYPE_YARN = "yarn"

class Llama:
    def __init__(self, weights, **options):
        print("a library that talks")
        self.options = options
        if options["type_v"] == "q8_0":
            raise ValueError("no such cache\\non this machine")
        if "draft_model" in options:
            os._exit(3)

    def generate(self, prompt, **sampling):
        assert sampling["temp"] == 0
        while True:
            yield 7 if self.options["flash_attn"] else len(prompt)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a package where every new process finds it."""

    def install(name: str, source: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        (tmp_path / name / "llama_speculative.py").write_text("LlamaPromptLookupDecoding = dict\n")

    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return install


@pytest.fixture
def gguf_file(folder, tmp_path) -> Path:
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    return write_gguf(tmp_path / "q8.gguf", config, byte_level_tokenizer(), weights, kind="Q8_0")


def found(path: Path, *wanted: str, **pythons: str) -> dict:
    engine = load(str(path), dtype="float32", device="cpu")
    return find_peers(path, engine, wanted or PEERS[2:], pythons)


def test_a_peer_runs_in_its_own_process_and_what_fails_is_skipped(installed, gguf_file, caplog):
    installed("llama_cpp", STAND_IN)
    installed("openvino_genai", "raise ImportError('built for\\nanother machine')")
    with caplog.at_level("INFO", "minitri"):
        peers = found(gguf_file)
    assert list(peers) == [
        "llama.cpp f16/f16",
        "llama.cpp f16/f16 fa",
        "llama.cpp native/f16",
        "llama.cpp native/f16 fa",
    ]
    assert list(islice(peers["llama.cpp f16/f16"]([5] * 40, 9), 3)) == [40] * 3
    assert list(islice(peers["llama.cpp native/f16 fa"]([5] * 40, 9), 3)) == [7] * 3
    lines = [line for line in caplog.messages if "penvino" in line or "llama.cpp" in line]
    missing, version, *failed = lines
    assert "openvino: skipped: ImportError: built for another machine" in missing
    assert "pip install openvino-genai, or --peer-python openvino=PATH" in missing
    assert version.startswith("llama.cpp 1.2.3, run by ")
    assert failed == [
        "llama.cpp f16/f16 lookup: skipped: llama.cpp ended with exit code 3",
        "llama.cpp f16/q8_0 fa: skipped: ValueError: no such cache on this machine",
        "llama.cpp native/q8_0 fa: skipped: ValueError: no such cache on this machine",
    ]
    assert not any("\n" in line for line in lines)


def test_peers_take_their_turns(installed, gguf_file, capsys):
    installed("llama_cpp", STAND_IN)
    with pytest.raises(SystemExit) as ended:
        bench.main(
            [
                *f"--compare --model {gguf_file} --method autoregressive --prompt-tokens 30 "
                "--new-tokens 12 --dtype float32 --device cpu --temperature 0 --peer".split(),
                "llama.cpp native/f16",
            ]
        )
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])["contestants"]
    assert ended.value.code == 0
    assert set(rows) == {"autoregressive", "llama.cpp native/f16"}
    assert rows["llama.cpp native/f16"]["ms_per_token"]["median"] > 0
    assert len(rows["llama.cpp native/f16"]["same_tokens"]) == 1  # one run for two seeds
    assert "llama.cpp native/f16 has read it in" in err


@pytest.mark.parametrize(
    ("scaling", "device", "reason"),
    [
        ("yarn:4", "cpu", "openvino: skipped: it reads no RoPE scaling"),
        (None, "meta", "llama.cpp: skipped: it is compared on a CPU, not on meta"),
        (None, "folder", "llama.cpp: skipped: it needs a GGUF file, and tiny is none"),
    ],
)
def test_what_cannot_be_compared_is_skipped(scaling, device, reason, gguf_file, folder, caplog):
    path = folder if device == "folder" else gguf_file
    engine = load(str(path), dtype="float32", device="cpu", rope_scaling=scaling)
    if device == "meta":
        engine.model.to("meta")
    with caplog.at_level("INFO", "minitri"):
        assert find_peers(path, engine, ["openvino f16/u8", "llama.cpp f16/f16"], {}) == {}
    assert any(line.startswith(reason) for line in caplog.messages)


def test_native_weights_are_quantized_ones(installed, folder, tmp_path, caplog):
    installed("llama_cpp", STAND_IN)
    config = Folder(folder).config("tiny")
    weights = dict(Folder(folder).tensors(config))
    path = write_gguf(tmp_path / "f16.gguf", config, byte_level_tokenizer(), weights, kind="F16")
    with caplog.at_level("INFO", "minitri"):
        assert list(found(path, "llama.cpp native/f16", "llama.cpp f16/f16")) == [
            "llama.cpp f16/f16"
        ]
    assert "llama.cpp native/f16: skipped: f16.gguf is not quantized" in caplog.messages


def test_float16_weights_are_those_that_minitri_computes_with(gguf_file):
    assert is_quantized(gguf_file)
    copy = as_float16(gguf_file)
    assert not is_quantized(copy)
    prompt, greedy = [5, 6, 7, 8] * 10, {"sampling": SamplingParams(temperature=0)}
    texts = [
        load(str(path), dtype="float32", device="cpu")
        .complete(
            prompt,
            generation=GenerationConfig(12, ignore_eos=True),
            **greedy,
            speculation=SpeculationConfig("autoregressive"),
        )
        .token_ids
        for path in (gguf_file, copy)
    ]
    assert texts[0] == texts[1]


def test_a_peer_that_is_dropped_leaves_no_process(installed):
    installed("llama_cpp", STAND_IN)
    settings = {
        "weights": "",
        "threads": 1,
        "kv": "f16",
        "lookup": False,
        "flash": False,
        "scaling": "yarn",
        "factor": 4.0,
        "original_context": 100,
    }
    tokens = worker_peer(sys.executable, "llama.cpp", settings)([1, 2], 10)
    assert next(tokens) == 2
    process = tokens._process
    del tokens
    assert process.returncode is not None


def test_a_program_that_is_no_python_is_one_line():
    with pytest.raises(InputError, match="cannot run /no/python: No such file"):
        Worker("/no/python", "openvino")
    with pytest.raises(InputError, match="openvino ended with exit code 1"):
        Worker("false", "openvino")
    with pytest.raises(InputError, match="what runs openvino says '"):
        Worker("cat", "openvino")


def test_a_peer_is_chosen_by_its_name_or_the_beginning_of_it():
    assert peer_names("llama.cpp f16/f16") == ["llama.cpp f16/f16"]
    assert peer_names("openvino f16") == [name for name in PEERS if name.startswith("openvino f16")]
    assert len(peer_names("openvino f16")) == 4


def test_prompt_lookup_says_what_plain_transformers_says(folder):
    """Both are greedy. Ended early, it leaves no thread that computes."""
    pytest.importorskip("transformers")
    engine = load(str(folder), dtype="float32")
    model = transformers_model(folder, engine)
    prompt = random_prompt(engine.config, 40) * 3
    plain = list(transformers_peer(model)(prompt, 30))
    assert list(islice(prompt_lookup_peer(model)(prompt, 40), 30)) == plain
    tokens = prompt_lookup_peer(model)(prompt, 40)
    assert [next(tokens), next(tokens)] == plain[:2]
    tokens.close()
    workers = [thread for thread in threading.enumerate() if thread.name == "prompt lookup"]
    for thread in workers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "package"), [("openvino f16", "openvino_genai"), ("llama.cpp f16", "llama_cpp")]
)
def test_peers_say_what_minitri_says(program, package, real_weights, long_text):
    """Greedily, with the real weights; rounded in other ways, later tokens may differ."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    engine = load("smollm2-135m", dtype="bfloat16", device="cpu")
    prompt = engine.tokenizer.encode(long_text)[:300]
    ours = engine.complete(
        prompt,
        sampling=SamplingParams(temperature=0),
        generation=GenerationConfig(8),
        speculation=SpeculationConfig("autoregressive"),
    ).token_ids
    wanted = peer_names(program)
    peers = find_peers(real_weights, engine, wanted, {})
    assert list(peers) == wanted
    for name, start in peers.items():
        assert tuple(islice(start(list(prompt), 8), 8)) == ours, name
