"""Writers of KV snapshots that end in any way: a file is the old one or a new one, and whole."""

import contextlib
import itertools
import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest

from minitri import InputError
from minitri.files import snapshots
from minitri.files.snapshots import origin_of, read_snapshot, write_snapshot
from tests.files.refused import refused
from tests.files.reuse.conftest import files_may_not_grow, say, small_disk


@pytest.fixture
def path(saved, engine, tmp_path) -> Path:
    """A file alone in a folder; the engine holds a text to save there."""
    engine.load_kv(saved[0])
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "x"


@contextlib.contextmanager
def forked(work, *given):
    """A process that does some work, and is killed at the end unless it has ended."""
    process = multiprocessing.get_context("fork").Process(target=work, args=given)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def save_all(path, source, origin, notes):
    """An engine refuses to save in a forked process."""
    held, _ = read_snapshot(str(source), origin)
    for note in notes:
        write_snapshot(str(path), held, origin, note)


@pytest.mark.parametrize("num_pieces", range(5))
def test_a_write_that_is_interrupted_leaves_the_old_file(path, engine, num_pieces, monkeypatch):
    """Before tokens, or K and V of two layers."""
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


def test_where_a_file_may_not_grow_the_old_one_stays(path, engine):
    path.write_text("old")
    with files_may_not_grow(), refused("cannot write", "too large"):
        engine.save_kv(path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_on_a_full_disk_the_old_file_stays(path, engine, saved, prompt):
    """With room for one file, and not for a second one next to it."""
    with small_disk(path.parent, saved[0].stat().st_size * 3 // 2):
        engine.save_kv(path, "old")
        with refused("cannot write", "No space left"):
            engine.save_kv(path, "new")
        assert list(path.parent.iterdir()) == [path]
        engine.load_kv(path)
        assert (engine.snapshot_note, say(engine, prompt)[0]) == ("old", saved[1])


def test_a_writer_that_is_killed_leaves_a_whole_file(path, engine, saved, prompt):
    """At any moment: others load the old file or a new one, never what is left of one."""
    engine.save_kv(path, "old")
    moments, notes = random.Random(0), set()
    work = (save_all, path, saved[0], origin_of(engine.model), map(str, itertools.count()))
    for _ in range(30):
        with forked(*work) as process:
            time.sleep(0.1 * moments.random())
        assert process.exitcode == -signal.SIGKILL
        assert engine.load_kv(path)
        notes.add(engine.snapshot_note)
    assert len(notes) > 5
    assert say(engine, prompt)[0] == saved[1]
    left = [file for file in path.parent.iterdir() if file != path]
    assert left, "no process was killed while it wrote"
    for unfinished in left:
        with contextlib.suppress(InputError):  # unless it was killed just before the end
            assert engine.load_kv(unfinished) == engine.load_kv(path)


def test_of_two_who_save_at_once_one_file_stays_whole(path, engine, saved):
    """Processes; who reads meanwhile has the whole file of one, or an error if it is replaced."""
    notes, seen = ["1" * 9999, "2"], set()
    work = (save_all, path, saved[0], origin_of(engine.model))
    with forked(*work, [notes[0]] * 100) as first, forked(*work, [notes[1]] * 100) as second:
        while first.is_alive() or second.is_alive():
            with contextlib.suppress(InputError):
                engine.load_kv(path)
                seen.add(engine.snapshot_note)
        assert first.exitcode == second.exitcode == 0
    assert seen <= {*notes}
    engine.load_kv(path)
    assert engine.snapshot_note in notes
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_overwritten_while_it_is_in_use_changes_nothing(saved, engine, prompt):
    path, text = saved
    engine.load_kv(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(9)
    assert say(engine, prompt) == (text, 120 - 1 - 16)
