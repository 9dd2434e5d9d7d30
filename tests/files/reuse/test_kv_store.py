"""The KV store: what one engine reads another need not, and never another text."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import minitri
from minitri.core.caches.full import HeldRow
from minitri.files import kv_store
from tests.conftest import load, refused, write_hf_folder
from tests.core.rigs import new_cache, random_prompt
from tests.files.reuse.conftest import files_may_not_grow, say

BLOCK = 32
LARGE = 1 << 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kv_store, "BLOCK", BLOCK)


@pytest.fixture(scope="module")
def other(folder):
    """A second replica."""
    return load(folder)


def ask(engine, prompt, folder, size=LARGE):
    """The text of an engine that has nothing but the store, and how many tokens it did not read."""
    engine.release()
    engine.open_kv_store(str(folder), size)
    answer = say(engine, prompt)
    engine.release()
    return answer


def blocks(folder) -> list[Path]:
    return [*Path(folder).glob("*.kvblock")]


def by_tokens(folder) -> dict[tuple[int, ...], Path]:
    return {tuple(load_file(path)["tokens"].tolist()): path for path in blocks(folder)}


def test_what_one_replica_reads_another_does_not(engine, other, prompt, text, tmp_path, caplog):
    """Three blocks of 32 tokens; the last 16 tokens are always read."""
    folder = tmp_path / "new" / "store"
    assert ask(engine, prompt, folder) == (text, 0)
    assert len(blocks(folder)) == 119 // BLOCK
    assert ask(other, prompt, folder) == (text, 3 * BLOCK)
    longer = [*prompt, 3, 4, 5] * 2
    assert ask(engine, longer, folder)[1] == 3 * BLOCK
    other.release()
    answer, _ = say(other, longer)
    other.release()
    other.open_kv_store(str(folder), LARGE)
    assert say(other, prompt) == (text, 3 * BLOCK)
    assert say(other, longer) == (answer, 7 * BLOCK)  # of the store, more than it holds
    assert ask(engine, [7, *prompt], folder)[1] == 0
    assert not caplog.records


def test_k_and_v_that_are_reused_are_those_of_a_prefill_to_the_bit(prompt, tmp_path):
    """Rows in memory end with generated tokens, which are read again, as decoding rounds otherwise.
    Heads are wide enough for tiles."""
    folder, saved = write_hf_folder(tmp_path / "model", head_dim=32), []
    engine = minitri.load(folder, dtype="bfloat16", device="cpu")
    if not engine.model.execution.is_row_invariant:
        pytest.skip("no compiled kernels here")
    talk = [*prompt, *say(engine, prompt)[0], *range(3, 33)]
    for num_cached in (119, 0, 4 * BLOCK):  # of a row in memory, of nothing, of the store
        text, num_held = say(engine, talk)
        assert num_held == num_cached
        engine.save_kv(tmp_path / "text.kv")
        saved.append((text, (tmp_path / "text.kv").read_bytes()))
        engine.release()
        engine.open_kv_store(str(tmp_path), LARGE)
    assert saved[0] == saved[1] == saved[2]


def test_a_block_that_is_damaged_or_removed_is_written_again(
    engine, other, prompt, text, tmp_path, caplog
):
    """The second of three is half written, which is one line; what else is noticed is in
    `test_snapshots.py`. An engine that has read what was removed writes it again, too."""
    ask(engine, prompt, tmp_path)
    whole = {path: path.read_bytes() for path in blocks(tmp_path)}
    block = by_tokens(tmp_path)[tuple(prompt[BLOCK : 2 * BLOCK])]
    block.write_bytes(whole[block][:1000])
    assert ask(other, prompt, tmp_path) == (text, BLOCK)
    [record] = caplog.records
    assert "KV store" in record.message
    assert "\n" not in record.message
    other.open_kv_store(str(tmp_path), LARGE)
    assert say(other, prompt) == (text, 3 * BLOCK)
    for path in whole:
        path.unlink()
    say(other, prompt)
    other.release()
    assert {path: path.read_bytes() for path in blocks(tmp_path)} == whole


def test_a_link_or_pipe_in_the_place_of_a_block_is_not_followed(
    engine, other, prompt, text, tmp_path, caplog
):
    """A link may lead to a whole block, whose times do not change, or to nothing."""
    ask(engine, prompt, tmp_path / "store")
    first = by_tokens(tmp_path / "store")[tuple(prompt[:BLOCK])]
    far = first.rename(tmp_path / "far")
    os.utime(far, (1, 1))
    for target in (far, tmp_path / "nothing", None):
        caplog.clear()
        first.symlink_to(target) if target else os.mkfifo(first)
        assert ask(other, prompt, tmp_path / "store") == (text, 0)
        assert "no regular file; delete it" in caplog.text
        first.unlink()
    assert far.stat().st_mtime == 1
    assert not (tmp_path / "nothing").exists()
    assert ask(engine, prompt, tmp_path / "store") == (text, 0)
    assert ask(engine, prompt, tmp_path / "store") == (text, 3 * BLOCK)


def test_a_block_of_another_place_is_not_used(engine, prompt, text, tmp_path, caplog):
    """A block of the same tokens has another name; if somebody copies it, its header tells."""
    ask(engine, prompt, tmp_path / "ours")
    assert ask(engine, [*prompt[BLOCK:], *prompt], tmp_path / "later")[1] == 0
    ours, later = (by_tokens(tmp_path / name) for name in ("ours", "later"))
    for tokens in later.keys() & ours.keys():
        shutil.copy(later[tokens], ours[tokens])
    assert ask(engine, prompt, tmp_path / "ours")[0] == text
    assert len(caplog.records) == 1


def test_engines_that_round_otherwise_and_other_owners_share_nothing(
    engine, prompt, tmp_path, monkeypatch
):
    """A setting of a library may make another engine round otherwise."""
    ask(engine, prompt, tmp_path)
    execution, nothing = engine.model.execution, HeldRow(new_cache(engine.config), 0, [])
    for change, owner, is_shared in (
        ({}, "", True),
        ({}, "a key", False),
        ({"computed_by": "another processor"}, "", False),
        ({"identify": lambda: "another model"}, "", False),
    ):
        monkeypatch.setattr(engine.model, "execution", replace(execution, **change))
        store = kv_store.KVStore(str(tmp_path), LARGE, engine.model)
        assert (store.longer(prompt, owner, nothing) is not nothing) == is_shared
    monkeypatch.setattr(engine.model, "execution", execution)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    store = kv_store.KVStore(str(tmp_path), LARGE, engine.model)
    assert store.longer(prompt, "", nothing) is nothing


def test_without_room_texts_are_those_of_old_with_one_line(engine, prompt, text, tmp_path, caplog):
    with files_may_not_grow():
        assert ask(engine, prompt, tmp_path) == (text, 0)
    [record] = caplog.records
    assert "File too large" in record.message
    assert not [*tmp_path.iterdir()]
    assert ask(engine, prompt, tmp_path) == (text, 0)
    assert ask(engine, prompt, tmp_path) == (text, 3 * BLOCK)


def test_of_a_snapshot_nobody_knows_who_computed_it(engine, prompt, saved, tmp_path):
    engine.load_kv(saved[0])
    engine.open_kv_store(str(tmp_path / "store"), LARGE)
    assert say(engine, prompt)[1] > 0
    engine.release()
    assert not blocks(tmp_path / "store")


def test_what_was_used_last_stays(engine, other, tmp_path):
    """Prompts have two blocks each; somebody else's files stay, too."""
    used, old, new = (random_prompt(engine.config, 90, seed=seed) for seed in range(3))
    (tmp_path / "novel.kv").write_bytes(b"x" * 10**6)
    unfinished = tmp_path / ".minitri-x.unfinished"
    unfinished.write_bytes(b"x")
    os.utime(unfinished, (1, 1))
    for seconds, prompt in enumerate((used, old), 2):
        ask(engine, prompt, tmp_path)
        for path in blocks(tmp_path):
            os.utime(path, (seconds, seconds))
    assert ask(other, used, tmp_path)[1] == 2 * BLOCK
    size = blocks(tmp_path)[0].stat().st_size
    ask(engine, new, tmp_path, size=5 * size)
    assert len(blocks(tmp_path)) <= 5
    assert ask(other, used, tmp_path)[1] == ask(other, new, tmp_path)[1] == 2 * BLOCK
    assert ask(other, old, tmp_path)[1] < 2 * BLOCK
    assert (tmp_path / "novel.kv").exists()
    assert not unfinished.exists()


def test_tokens_do_not_wait_for_a_slow_store(engine, prompt, text, tmp_path, monkeypatch):
    may_write, write = threading.Event(), kv_store.write_snapshot
    late = lambda *arguments: may_write.wait(60) and write(*arguments)  # noqa: E731
    monkeypatch.setattr(kv_store, "write_snapshot", late)
    monkeypatch.setattr(kv_store, "WAITING_BYTES", 20_000)
    engine.release()
    engine.open_kv_store(str(tmp_path), LARGE)
    assert say(engine, prompt) == (text, 0)
    assert not blocks(tmp_path)
    may_write.set()
    engine.release()
    assert 0 < len(blocks(tmp_path)) < 3
    ask(engine, prompt, tmp_path)
    assert len(blocks(tmp_path)) == 3


def test_a_run_that_goes_on_after_its_store_was_closed_ends_well(engine, tmp_path):
    engine.open_kv_store(str(tmp_path), LARGE)
    run = engine.generate([[7] * 120], max_new_tokens=3)
    engine.release()
    run.result()
    assert not blocks(tmp_path)


def test_a_folder_that_cannot_be_opened_is_one_line(engine):
    for folder, word in (("s3://bucket/kv", "a URL"), ("/dev/null/x", "Not a")):
        with refused("kv_store is", "cannot be opened", word):
            engine.open_kv_store(folder, LARGE)
