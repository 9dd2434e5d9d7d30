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
from tests.conftest import edit_json, write_hf_folder
from tests.files.reuse.conftest import say


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_after_a_restart_is_the_text_without_one(folder, prompt, dtype, tmp_path):
    first, again = (minitri.load(folder, dtype=dtype, device="cpu") for _ in range(2))
    text, _ = say(first, prompt)
    num_saved = first.save_kv(tmp_path / "x", "a note")
    assert again.load_kv(tmp_path / "x") == num_saved == len(again.held_tokens)
    assert again.snapshot_note == "a note"
    assert again.held_tokens[:119] == prompt[:119]
    assert say(again, prompt) == (text, 120 - 1 - 16)
    again.release()
    again.load_kv(tmp_path / "x")
    text, cached = say(again, [*prompt, 3, 4, 5])
    assert cached > 100
    first.release()
    assert say(first, [*prompt, 3, 4, 5]) == (text, 0)


def test_the_file_is_k_and_v_and_hardly_more(saved, engine, tmp_path):
    path, _ = saved
    num_bytes = engine.load_kv(path) * engine.config.kv_values_per_token * 4
    assert path.stat().st_size - num_bytes < 0.02 * num_bytes + 500
    engine.save_kv(tmp_path / "again", "a note")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_snapshot_outlives_runs_of_other_texts(saved, engine, prompt):
    path, text = saved
    engine.load_kv(path)
    for other in (5, 6):
        say(engine, [other] * 130)
    assert say(engine, prompt) == (text, 120 - 1 - 16)
    engine.release()
    assert say(engine, prompt) == (text, 0)


def test_nothing_is_saved_of_nothing(engine, tmp_path):
    engine.release()
    with pytest.raises(InputError, match="no KV cache"):
        engine.save_kv(tmp_path / "x")
    made = tiny_engine()
    say(made, [1, 2, 3])
    with pytest.raises(InputError, match="not read from a file"):
        made.save_kv(tmp_path / "x")


@pytest.mark.parametrize("path", ["no/such/folder/x", ".", "nul\0"])
def test_a_place_that_cannot_be_written_is_named(engine, prompt, path):
    say(engine, prompt)
    with pytest.raises(InputError, match="cannot write"):
        engine.save_kv(path)
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
    "cut to half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0" * 8,
    "one bit": lambda data: flip(data, 0.5),
    "a bit of the tokens": lambda data: flip(data, 0.01),
    "a bit of the last layer": lambda data: flip(data, 0.98),
    "a shape that lies": with_header(lambda header: header["kv"]["shape"].reverse()),
    "a dtype that lies": with_header(lambda header: header["kv"].update(dtype="I32")),
    "no tokens": with_header(lambda header: header.pop("tokens")),
    "another note": with_header(lambda header: header["__metadata__"].update(note="more")),
    "no metadata": with_header(lambda header: header.pop("__metadata__")),
    "a huge header": lambda data: b"\xff" * 7 + b"\x7f" + data,
    "text": lambda data: b"She had been forced into prudence",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_and_the_engine_goes_on(saved, engine, prompt, damage):
    path, text = saved
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(InputError, match="KV snapshot") as error:
        engine.load_kv(path)
    assert "\n" not in str(error.value)
    assert say(engine, prompt) == (text, 0)


def test_a_file_of_another_model_dtype_or_rope_is_refused(saved, folder, tmp_path):
    other = write_hf_folder(tmp_path / "other", seed=8)
    for name, dtype, rope, fact in (
        (other, "float32", None, "weights"),
        (folder, "bfloat16", None, "dtype"),
        (folder, "float32", "linear:2", "rope"),
    ):
        engine = minitri.load(name, device="cpu", dtype=dtype, rope_scaling=rope)
        with pytest.raises(InputError, match=f"KV snapshot .*its {fact} is"):
            engine.load_kv(saved[0])
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match="KV snapshot"):
            engine.load_kv(missing)


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


def test_what_is_no_regular_file_is_not_replaced(saved, engine, tmp_path):
    """As root one could replace a device. A test of this must stay in its own folder."""
    engine.load_kv(saved[0])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="cannot write .*no regular file"):
        engine.save_kv(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_one_other_number_in_the_weights_or_the_config_is_another_model(saved, folder, tmp_path):
    """Also far from any evenly spread sample of 4,096."""
    for changed in ("weights", "config"):
        other = shutil.copytree(folder, tmp_path / changed)
        if changed == "config":
            edit_json(other / "config.json", rms_norm_eps=2e-6)
        else:
            weights = load_file(other / "model.safetensors")
            table = weights["model.embed_tokens.weight"]
            assert table.numel() > 2 * 4096
            table.view(-1)[1] += 1
            save_file(weights, other / "model.safetensors", {"format": "pt"})
        engine = minitri.load(other, device="cpu", dtype="float32")
        with pytest.raises(InputError, match=f"KV snapshot .*its {changed} is"):
            engine.load_kv(saved[0])
    again = minitri.load(shutil.copytree(folder, tmp_path / "copy"), device="cpu", dtype="float32")
    assert again.load_kv(saved[0])
