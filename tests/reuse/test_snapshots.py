"""KV snapshots: what is loaded is what was saved, or nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import minitri
from minitri import End, GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.caches.snapshots import Origin, Snapshot, write_snapshot
from tests.cascades import random_prompt, tiny_engine
from tests.conftest import tiny_config, write_hf_folder

WARM = SamplingParams(0.9, 30)
SPECULATION = SpeculationConfig("triforce", gamma1=2, gamma2=3, budget=32, num_recent_tokens=16)


def say(engine, prompt, **settings):
    generation = GenerationConfig(20, ignore_eos=True, prefill_chunk=32)
    run = engine.generate(
        prompt, sampling=WARM, generation=generation, speculation=SPECULATION, **settings
    )
    [end] = [event for event in run if isinstance(event, End)]
    return end.token_ids, end.row_stats.num_cached_tokens


@pytest.fixture(scope="module")
def prompt(engine):
    return random_prompt(engine.config, 120, seed=1)


@pytest.fixture
def saved(engine, prompt, tmp_path):
    engine.release()
    text, _ = say(engine, prompt)
    path = tmp_path / "text.kv"
    assert engine.save_kv(path) == len(engine.held_tokens)
    engine.release()
    return path, text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_after_a_restart_is_the_text_without_one(folder, prompt, dtype, tmp_path):
    first = minitri.load(folder, dtype=dtype, device="cpu")
    again = minitri.load(folder, dtype=dtype, device="cpu")
    text, _ = say(first, prompt)
    num_saved, path = first.save_kv(tmp_path / "x"), tmp_path / "x"
    assert again.load_kv(path) == num_saved == len(again.held_tokens)
    assert again.held_tokens[:120] == prompt
    assert say(again, prompt) == (text, 120 - 1 - 16)
    longer = [*prompt, 3, 4, 5]
    again.release()
    again.load_kv(path)
    text, cached = say(again, longer)
    assert cached > 100
    first.release()
    assert say(first, longer) == (text, 0)


def test_tokens_that_were_generated_stay_inexact_in_a_file(tmp_path):
    """As on compiled kernels, where no other text may begin with them."""
    config, tokens = tiny_config(), list(range(20))
    pair = torch.randn(config.num_kv_heads, 20, config.head_dim)
    source = SimpleNamespace(tokens=tokens, num_exact=12, layers=lambda n: [(pair, pair)] * 2)
    origin = Origin(config, torch.float32, "x")
    assert write_snapshot(str(tmp_path / "x"), source, origin, "a note") == 20
    held = Snapshot(str(tmp_path / "x"), origin)
    assert (held.tokens, held.num_exact, held.note) == (tokens, 12, "a note")
    assert [keys.shape[1] for keys, _ in held.layers(12)] == [12, 12]


def test_the_file_is_k_and_v_and_hardly_more(saved, engine):
    path, _ = saved
    with safe_open(path, "pt") as file:
        num_tokens = len(file.get_tensor("tokens"))
        assert len(file.keys()) == 2 + 2 * engine.config.num_layers
    num_bytes = num_tokens * engine.config.kv_values_per_token * 4
    overhead = path.stat().st_size - num_bytes
    assert overhead < 0.02 * num_bytes + 250 * engine.config.num_layers  # a tiny model's header


def test_what_is_saved_again_is_the_same_file(saved, engine, tmp_path):
    engine.load_kv(saved[0])
    engine.save_kv(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved[0].read_bytes()


def test_a_snapshot_outlives_runs_of_other_texts(saved, engine, prompt):
    path, text = saved
    engine.load_kv(path)
    say(engine, [5] * 130)
    say(engine, [6] * 130)
    assert say(engine, prompt) == (text, 120 - 1 - 16)
    engine.release()
    assert say(engine, prompt) == (text, 0)


def test_nothing_is_saved_of_nothing(engine, tmp_path):
    engine.release()
    with pytest.raises(InputError, match="no KV cache to save; let the engine read a prompt"):
        engine.save_kv(tmp_path / "x")
    made = tiny_engine()
    say(made, [1, 2, 3])
    with pytest.raises(InputError, match="was not read from a file"):
        made.save_kv(tmp_path / "x")


@pytest.mark.parametrize("path", ["no/such/folder/x", ".", "nul\0"])
def test_a_place_that_cannot_be_written_is_named(engine, prompt, path):
    say(engine, prompt)
    with pytest.raises(InputError, match="cannot write .*name a file in a folder with room"):
        engine.save_kv(path)
    assert engine.held_tokens


def edited_header(path, edit):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def swap(header):
    first, second = header["keys.0"], header["values.0"]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


DAMAGE = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "one bit": lambda path: path.write_bytes(flipped(path.read_bytes(), 0.5)),
    "a bit of the tokens": lambda path: path.write_bytes(flipped(path.read_bytes(), 0.01)),
    "a bit of the last layer": lambda path: path.write_bytes(flipped(path.read_bytes(), 0.98)),
    "swapped": lambda path: edited_header(path, swap),
    "a shape that lies": lambda path: edited_header(
        path, lambda header: header["keys.1"].update(shape=header["keys.1"]["shape"][::-1])
    ),
    "no tokens": lambda path: edited_header(path, lambda header: header.pop("tokens")),
    "no number": lambda path: edited_header(
        path, lambda header: header["__metadata__"].update(num_exact="many")
    ),
    "more than there are": lambda path: edited_header(
        path, lambda header: header["__metadata__"].update(num_exact="1000")
    ),
    "no metadata": lambda path: edited_header(path, lambda header: header.pop("__metadata__")),
    "a huge header": lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()),
    "text": lambda path: path.write_text("She had been forced into prudence"),
}


def flipped(data: bytes, where: float) -> bytes:
    size = int.from_bytes(data[:8], "little") + 8
    place = size + int((len(data) - size) * where)
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_and_the_engine_goes_on(saved, engine, prompt, damage):
    path, text = saved
    DAMAGE[damage](path)
    with pytest.raises(InputError, match="KV snapshot .*; read the text again") as error:
        engine.load_kv(path)
    assert "\n" not in str(error.value)
    assert say(engine, prompt) == (text, 0)


def test_a_file_of_another_model_dtype_or_rope_is_refused(saved, folder, tmp_path):
    path, _ = saved
    other = write_hf_folder(tmp_path / "other", seed=8)
    for name, settings, fact in (
        (other, {"dtype": "float32"}, "weights"),
        (folder, {"dtype": "bfloat16"}, "dtype"),
        (folder, {"dtype": "float32", "rope_scaling": "linear:2"}, "rope"),
    ):
        engine = minitri.load(name, device="cpu", **settings)
        with pytest.raises(InputError, match=f"KV snapshot .* has {fact} "):
            engine.load_kv(path)
    with pytest.raises(InputError, match="there is no KV snapshot"):
        engine.load_kv(tmp_path / "missing")
    with pytest.raises(InputError, match="there is no KV snapshot"):
        engine.load_kv(tmp_path)


WRITERS = """
import os, sys, torch
from types import SimpleNamespace
from minitri.caches.snapshots import Origin, write_snapshot
from minitri.config import ModelConfig
origin = Origin(ModelConfig(40, 64, 64, 2, 2, 32, 100, 4096), torch.float32, "x")
pair = torch.ones(2, 2000, 32)
source = SimpleNamespace(
    tokens=[1] * 2000, num_exact=2000, layers=lambda n: ((pair, pair) for _ in range(40)),
)
for _ in sys.stdin:
    if pid := os.fork():
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
    else:
        while True:
            write_snapshot(sys.argv[1], source, origin)
"""


def test_a_process_that_is_killed_leaves_the_old_file_or_a_whole_new_one(tmp_path):
    """kill -9 at 20 random moments of writing."""
    path, rng, seen = tmp_path / "x", random.Random(0), set()
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        for _ in range(20):
            path.write_text("old")
            process.stdin.write("write\n")
            pid = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert process.stdout.readline() == "gone\n"
            if path.read_bytes() == b"old":
                seen.add("old")
                continue
            with safe_open(path, "pt") as file:
                assert len(file.get_tensor("checksums")) == 81
                assert torch.equal(file.get_tensor("values.39"), torch.ones(2, 2000, 32))
            seen.add("new")
        process.stdin.close()
    assert seen == {"old", "new"}
