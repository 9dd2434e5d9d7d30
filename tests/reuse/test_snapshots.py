"""KV snapshots: what is loaded is what was saved, or nothing."""

import json
import os
import resource
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file

import minitri
from minitri import InputError
from minitri.caches import snapshots
from tests.cascades import WARM, random_prompt, settings_of, tiny_engine
from tests.conftest import edit_json, write_hf_folder

SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16, "prefill_chunk": 32}


def say(engine, prompt):
    """The text after a prompt, and how many of its tokens were not read."""
    end = engine.complete(prompt, **settings_of("triforce", 20, WARM, **SIZES))
    return end.token_ids, end.row_stats.num_cached_tokens


@pytest.fixture(scope="module")
def prompt(engine):
    return random_prompt(engine.config, 120, seed=1)


@pytest.fixture
def saved(engine, prompt, tmp_path):
    engine.release()
    text, _ = say(engine, prompt)
    path = tmp_path / "text.kv"
    assert engine.save_kv(path, "a note") == len(engine.held_tokens)
    engine.release()
    return path, text


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


@pytest.mark.parametrize("num_pieces", range(5))
def test_a_write_that_is_interrupted_leaves_the_old_file(saved, engine, num_pieces, monkeypatch):
    """Before tokens, or K and V of two layers."""
    engine.load_kv(saved[0])
    path = saved[0].parent / "folder" / "x"
    path.parent.mkdir()
    path.write_text("old")
    pieces, whole = iter(range(num_pieces)), snapshots.as_bytes

    def as_bytes(values):
        if next(pieces, None) is None:
            raise KeyboardInterrupt
        return whole(values)

    monkeypatch.setattr(snapshots, "as_bytes", as_bytes)
    with pytest.raises(KeyboardInterrupt):
        engine.save_kv(path, "a note")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


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


def test_of_two_who_save_at_once_one_file_stays_whole(saved, engine, tmp_path):
    engine.load_kv(saved[0])
    notes = [str(number) * (1 + 999 * number) for number in range(4)]
    path = tmp_path / "folder" / "x"
    path.parent.mkdir()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda note: engine.save_kv(path, note), notes * 5))
    engine.load_kv(path)
    assert engine.snapshot_note in notes
    assert list(path.parent.iterdir()) == [path]


def in_a_fork(work) -> int:
    """How a process ends that does some work."""
    if not (pid := os.fork()):
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_full_disk_and_kill_leave_the_old_file(saved, engine, tmp_path, monkeypatch):
    engine.load_kv(saved[0])
    path = tmp_path / "folder" / "x"
    path.parent.mkdir()
    path.write_text("old")

    def on_a_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))
        with pytest.raises(InputError, match="cannot write .*too large.*room"):
            engine._pool.save(str(path), "")
        os.kill(os.getpid(), signal.SIGUSR1)

    assert in_a_fork(on_a_full_disk) == signal.SIGUSR1
    assert list(path.parent.iterdir()) == [path]
    whole = snapshots.as_bytes

    def as_bytes(values):
        if values.dim() > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(values)

    monkeypatch.setattr(snapshots, "as_bytes", as_bytes)
    assert in_a_fork(lambda: engine._pool.save(str(path), "")) == signal.SIGKILL
    assert path.read_text() == "old"


def test_a_file_that_is_cut_or_overwritten_while_it_is_in_use_changes_nothing(
    saved, engine, prompt
):
    path, text = saved
    engine.load_kv(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(9)
    assert say(engine, prompt) == (text, 120 - 1 - 16)


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
