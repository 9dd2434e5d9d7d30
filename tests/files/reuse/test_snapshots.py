"""KV snapshots: what is loaded is what was saved, or nothing."""

import json
import os
import shutil
import stat

import pytest
from safetensors.torch import load_file, save_file

import minitri
from minitri import InputError
from tests.cascades import tiny_engine
from tests.conftest import edit_json
from tests.files.refused import refused
from tests.files.reuse.conftest import say


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_after_a_restart_is_the_text_without_one(folder, prompt, dtype, tmp_path):
    """The file holds K and V and hardly more, and is the same when it is saved again."""
    first, again = (minitri.load(folder, dtype=dtype, device="cpu") for _ in range(2))
    path, longer = tmp_path / "x", [*prompt, 3, 4, 5]
    text, _ = say(first, prompt)
    num_saved = first.save_kv(path, "a note")
    assert again.load_kv(path) == num_saved == len(again.held_tokens)
    assert again.snapshot_note == "a note"
    assert again.held_tokens[:119] == prompt[:119]
    num_bytes = num_saved * first.config.kv_values_per_token * first.model.dtype.itemsize
    assert path.stat().st_size - num_bytes < 0.02 * num_bytes + 700
    again.save_kv(tmp_path / "again", "a note")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert say(again, prompt) == (text, 120 - 1 - 16)
    again.release()
    again.load_kv(path)
    text, cached = say(again, longer)
    assert cached > 100
    first.release()
    assert say(first, longer) == (text, 0)


def test_a_snapshot_outlives_runs_of_other_texts(saved, engine, prompt):
    path, text = saved
    engine.load_kv(path)
    for other in (5, 6):
        say(engine, [other] * 130)
    assert say(engine, prompt) == (text, 120 - 1 - 16)
    engine.release()
    assert say(engine, prompt) == (text, 0)


def test_what_cannot_be_saved_is_refused_and_stays(engine, prompt, tmp_path):
    """No text, no model of a file, and no place; as root one could replace a device."""
    engine.release()
    with refused("no KV cache"):
        engine.save_kv(tmp_path / "x")
    made = tiny_engine()
    say(made, [1, 2, 3])
    with pytest.raises(InputError, match="not read from a file"):
        made.save_kv(tmp_path / "x")
    say(engine, prompt)
    os.mkfifo(tmp_path / "pipe")
    for path in ("no/such/folder/x", ".", "nul\0", str(tmp_path / "pipe")):
        with refused("cannot write"):
            engine.save_kv(path)
    assert (tmp_path / "pipe").is_fifo()
    assert engine.held_tokens


def with_header(edit):
    def damage(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return damage


def flip(data: bytes, where: float) -> bytes:
    """With another bit after the header."""
    size = int.from_bytes(data[:8], "little") + 8
    place = size + int((len(data) - size) * where)
    return data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]


DAMAGE = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0" * 8,
    "a bit of the tokens": lambda data: flip(data, 0.01),
    "a bit of the last layer": lambda data: flip(data, 0.98),
    "a shape that lies": with_header(lambda header: header["kv"]["shape"].reverse()),
    "a dtype that lies": with_header(lambda header: header["kv"].update(dtype="I32")),
    "no tokens": with_header(lambda header: header.pop("tokens")),
    "another note": with_header(lambda header: header["__metadata__"].update(note="more")),
    "no metadata": with_header(lambda header: header.pop("__metadata__")),
    "a huge header": lambda data: b"\xff" * 7 + b"\x7f" + data,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_and_the_engine_goes_on(saved, engine, prompt, damage):
    path, text = saved
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with refused("KV snapshot"):
        engine.load_kv(path)
    assert say(engine, prompt) == (text, 0)


@pytest.mark.parametrize("fact", ["weights", "dtype", "rope", "config"])
def test_a_file_of_another_model_dtype_or_rope_is_refused(saved, folder, tmp_path, fact):
    """One other number in the weights, far from any evenly spread sample, is another model."""
    other = shutil.copytree(folder, tmp_path / "other")
    settings = {"dtype": "bfloat16" if fact == "dtype" else "float32", "device": "cpu"}
    assert minitri.load(other, **settings | {"dtype": "float32"}).load_kv(saved[0])
    if fact == "rope":
        settings["rope_scaling"] = "linear:2"
    elif fact == "config":
        edit_json(other / "config.json", rms_norm_eps=2e-6)
    elif fact == "weights":
        weights = load_file(other / "model.safetensors")
        weights["model.embed_tokens.weight"].view(-1)[1] += 1
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    with refused("KV snapshot", f"its {fact} is"):
        minitri.load(other, **settings).load_kv(saved[0])


def test_a_file_is_its_owners_and_a_link_is_followed(saved, engine, tmp_path):
    engine.load_kv(saved[0])
    old = os.umask(0)
    try:
        engine.save_kv(tmp_path / "plain")
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to("folder/far")
        for _ in range(2):  # where there is nothing yet, and where there is a file
            engine.save_kv(tmp_path / "link")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "far").read_bytes() == (tmp_path / "plain").read_bytes()
    for missing in (tmp_path / "missing", tmp_path):
        with refused("KV snapshot"):
            engine.load_kv(missing)
