"""KV snapshots: what is loaded is what was saved, or nothing; whoever saves and ends in any way
leaves the old file or a new one."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

import minitri
from minitri import InputError
from minitri.files import snapshots
from minitri.files.snapshots import read_snapshot, write_snapshot
from minitri.loader import OpenEngine
from tests.conftest import edit_json, load, refused, tiny_engine
from tests.files.reuse.conftest import files_may_not_grow, say
from tests.files.test_checkpoint import as_gguf


def test_a_text_after_a_restart_is_the_text_without_one(engine, folder, prompt, text, tmp_path):
    """The file holds K and V and hardly more, and is the same when it is saved again."""
    again = load(folder)
    path, longer = tmp_path / "x", [*prompt, 3, 4, 5]
    num_saved = engine.save_kv(path, "a note")
    assert again.load_kv(path) == num_saved == len(again.held_tokens)
    assert again.snapshot_note == "a note"
    assert again.held_tokens[:119] == prompt[:119]
    num_bytes = num_saved * engine.config.kv_values_per_token * 4
    assert path.stat().st_size - num_bytes < 0.02 * num_bytes + 700
    again.save_kv(tmp_path / "again", "a note")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert say(again, prompt) == (text, 120 - 1 - 16)
    again.release()
    again.load_kv(path)
    answer, cached = say(again, longer)
    assert cached > 100
    engine.release()
    assert say(engine, longer) == (answer, 0)


def test_what_is_loaded_outlives_its_file_and_runs_of_other_texts(saved, engine, prompt):
    path, text = saved
    engine.load_kv(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(9)
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
    with refused("not read from a file"):
        made.save_kv(tmp_path / "x")
    say(engine, prompt)
    os.mkfifo(tmp_path / "pipe")
    for path in ("no/such/folder/x", ".", "nul\0", str(tmp_path / "pipe")):
        with refused("cannot write"):
            engine.save_kv(path)
    assert (tmp_path / "pipe").is_fifo()
    assert engine.held_tokens


DAMAGE = {
    "cut": lambda header, body: body.pop(),
    "a bit of the tokens": lambda header, body: body.__setitem__(5, body[5] ^ 64),
    "a bit of the last layer": lambda header, body: body.__setitem__(-99, body[-99] ^ 64),
    "a shape that lies": lambda header, body: header["kv"]["shape"].reverse(),
    "a dtype that lies": lambda header, body: header["kv"].update(dtype="I32"),
    "no tokens": lambda header, body: header.pop("tokens"),
    "another note": lambda header, body: header["__metadata__"].update(note="more"),
    "no metadata": lambda header, body: header.pop("__metadata__"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_and_the_engine_goes_on(saved, engine, prompt, damage):
    path, text = saved
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little") + 8
    header, body = json.loads(data[8:size]), data[size:]
    DAMAGE[damage](header, body)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + body)
    with refused("KV snapshot"):
        engine.load_kv(path)
    assert say(engine, prompt) == (text, 0)


def test_shapes_that_are_not_the_models_are_refused_though_the_checksum_is_right(saved, engine):
    """Else a text would read slots or layers that nobody has written."""
    path, _ = saved
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little") + 8
    shape = json.loads(data[8:size])["kv"]["shape"]
    for axis in range(5):
        header = json.loads(data[8:size])
        header["kv"]["shape"] = [*shape[:axis], 1, *shape[axis + 1 :]]
        text = json.dumps(header).encode()
        tokens = data[size : size + 4 * shape[3]]
        body = tokens + bytes(math.prod(header["kv"]["shape"]) * engine.model.dtype.itemsize)
        total = zlib.crc32(body, zlib.crc32(text)).to_bytes(8, "little")
        path.write_bytes(len(text).to_bytes(8, "little") + text + body + total)
        with refused("KV snapshot"):
            engine.load_kv(path)


def test_a_large_file_of_another_kind_is_not_read(engine, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    os.truncate(path, 1 << 28)
    with refused("KV snapshot", "another file"):
        engine.load_kv(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


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


def test_weights_that_were_replaced_on_the_disk_do_not_name_those_in_memory(folder, tmp_path):
    """The new file may have the same times; a GGUF file's numbers may not have been read before."""
    copy, file = shutil.copytree(folder, tmp_path / "x"), as_gguf(folder, tmp_path / "x.gguf")
    loaded = minitri.load(copy, device="cpu")
    opened = OpenEngine(model=str(file), device="cpu")
    for path in (copy / "model.safetensors", file):
        Path(shutil.copy2(path, tmp_path / "new")).replace(path)
    for engine in (loaded, opened.load()):
        say(engine, [1, 2, 3])
        with refused("changed after they were opened", "load the model again"):
            engine.save_kv(tmp_path / "text.kv")


def test_a_program_that_changes_its_folder_saves_k_and_v(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    engine = minitri.load(folder.name, device="cpu")
    say(engine, [1, 2, 3])
    monkeypatch.chdir(tmp_path)
    assert engine.save_kv(b"x") == engine.load_kv(b"x") == len(engine.held_tokens)


def test_a_file_is_its_owners_and_replaces_a_snapshot_but_no_link_or_other_file(
    saved, engine, tmp_path
):
    engine.load_kv(saved[0])
    old = os.umask(0)
    try:
        for _ in range(2):
            engine.save_kv(tmp_path / "plain")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o600
    (tmp_path / "manual.md").write_text("mine")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "far").symlink_to("nothing")
    for name in ("manual.md", "link", "far"):
        with refused("cannot write", "is there"):
            engine.save_kv(tmp_path / name)
    assert (tmp_path / "manual.md").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    for missing in (tmp_path / "missing", tmp_path):
        with refused("KV snapshot"):
            engine.load_kv(missing)


@pytest.fixture
def path(saved, engine, tmp_path) -> Path:
    """A file alone in a folder; the engine holds a text to save there."""
    engine.load_kv(saved[0])
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "x"


def forked(*given):
    process = multiprocessing.get_context("fork").Process(target=save_all, args=given, daemon=True)
    process.start()
    return process


def save_all(path, source, model, notes, most=None):
    """Without an engine, which may not save after a fork; killed after `most` calls or returns."""
    held, _ = read_snapshot(source, model)
    moments = itertools.count()

    def count(*_):
        if next(moments) == most:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    for note in notes:
        write_snapshot(path, held, model, note)
    sys.setprofile(None)


@pytest.mark.parametrize("num_pieces", [0, 1, 4])
def test_a_write_that_is_interrupted_leaves_the_old_file(path, engine, num_pieces, monkeypatch):
    """Before tokens, or K and V of two layers; or as there is no room."""
    engine.save_kv(path, "old")
    old = path.read_bytes()
    with files_may_not_grow(), refused("cannot write", "too large"):
        engine.save_kv(path)
    sums = Mock(side_effect=[0] * (1 + num_pieces) + [KeyboardInterrupt])  # header, pieces
    monkeypatch.setattr(snapshots, "crc32", sums)
    with pytest.raises(KeyboardInterrupt):
        engine.save_kv(path, "a note")
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_is_killed_leaves_a_whole_file(path, engine, saved, prompt):
    """Others load the old file or the new one, never what is left of one, at any moment."""
    engine.save_kv(path, "old")
    codes, notes = [], []
    while {*codes} <= {-signal.SIGKILL}:
        writer = forked(path, saved[0], engine.model, ["new"], 149 * len(codes))
        writer.join(60)
        codes.append(writer.exitcode)
        assert engine.load_kv(path)
        notes.append(engine.snapshot_note)
    assert codes[-1] == 0
    assert (notes[0], notes[-1]) == ("old", "new")
    assert say(engine, prompt)[0] == saved[1]
    left = [file for file in path.parent.iterdir() if file != path]
    assert left, "no process was killed while it wrote"
    for unfinished in left:
        with contextlib.suppress(InputError):  # unless it was killed just before the end
            assert engine.load_kv(unfinished) == engine.load_kv(path)


def test_of_two_who_save_at_once_one_file_stays_whole(path, engine, saved):
    """Processes; who reads meanwhile has the whole file of one, or an error if it is replaced."""
    notes, seen = ["1" * 9999, "2"], set()
    writers = [forked(path, saved[0], engine.model, [note] * 40) for note in notes]
    while any(writer.is_alive() for writer in writers):
        with contextlib.suppress(InputError):
            engine.load_kv(path)
            seen.add(engine.snapshot_note)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {*notes}
    engine.load_kv(path)
    assert engine.snapshot_note in notes
    assert list(path.parent.iterdir()) == [path]
