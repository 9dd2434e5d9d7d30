"""The KV store: what one engine reads another need not, and never another text."""

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

import minitri
from minitri import InputError
from minitri.apps.chat.__main__ import main as chat
from minitri.files import kv_store
from minitri.files.snapshots import origin_of
from tests.cascades import tiny_engine
from tests.conftest import write_hf_folder
from tests.core.rigs import random_prompt
from tests.files.reuse.conftest import say
from tests.files.reuse.test_snapshots import DAMAGE

BLOCK = 32
LARGE = 1 << 30


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kv_store, "BLOCK", BLOCK)


@pytest.fixture(scope="module")
def other(folder):
    """A second replica."""
    return minitri.load(folder, dtype="float32", device="cpu")


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    if request.param == "disk":
        yield str(tmp_path / "store")
    else:
        yield "memory://kv-store-test"
        fsspec.filesystem("memory").store.clear()


def ask(engine, prompt, url, size=LARGE):
    """The text of an engine that has nothing but the store, and how many tokens it did not read."""
    engine.release()
    engine.open_kv_store(str(url), size)
    found = say(engine, prompt)
    engine.release()
    return found


def paths(url):
    fs, folder = fsspec.core.url_to_fs(str(url))
    return sorted(it for it in fs.ls(folder, detail=False) if it.endswith(".kvblock"))


@pytest.fixture
def text(engine, prompt):
    engine.release()
    return say(engine, prompt)[0]


def test_what_one_replica_reads_another_does_not(engine, other, prompt, text, url, caplog):
    """Three blocks of 32 tokens; the last 16 tokens are always read."""
    assert ask(engine, prompt, url) == (text, 0)
    assert len(paths(url)) == 119 // BLOCK
    assert ask(other, prompt, url) == (text, 3 * BLOCK)
    longer = [*prompt, 3, 4, 5] * 2
    assert ask(engine, longer, url)[1] == 3 * BLOCK
    other.release()
    assert ask(engine, longer, url) == (say(other, longer)[0], 7 * BLOCK)
    assert ask(engine, [7, *prompt], url)[1] == 0
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k_and_v_of_the_store_are_those_of_a_prefill_to_the_bit(folder, dtype, tmp_path, url):
    engines = [minitri.load(folder, dtype=dtype, device="cpu") for _ in range(2)]
    prompt = random_prompt(engines[0].config, 120, seed=3)
    saved = []
    for engine, is_there in zip(engines, (False, True), strict=True):
        engine.open_kv_store(url, LARGE)
        text, num_held = say(engine, prompt)
        assert num_held == is_there * 3 * BLOCK
        engine.save_kv(tmp_path / "text.kv")
        saved.append((text, (tmp_path / "text.kv").read_bytes()))
        engine.close()
    assert saved[0] == saved[1]


def test_k_and_v_of_what_was_generated_do_not_count_as_a_prompts(engine, other, prompt, url):
    """They are read with the next question, and stored then."""
    engine.release()
    engine.open_kv_store(url, LARGE)
    text, _ = say(engine, prompt)
    talk = [*prompt, *text, 9, 8, 7]
    talked, _ = say(engine, talk)
    engine.release()
    assert len(paths(url)) == 4
    other.release()
    assert say(other, talk) == (talked, 0)
    assert ask(other, [*talk, 5] * 2, url)[1] == 4 * BLOCK
    assert ask(other, talk, url) == (talked, 3 * BLOCK)


def test_memory_that_holds_more_is_not_replaced(engine, prompt, text, url, monkeypatch):
    ask(engine, prompt, url)
    engine.open_kv_store(url, LARGE)
    assert say(engine, prompt) == (text, 3 * BLOCK)
    monkeypatch.setattr(kv_store, "read_snapshot", lambda *_: pytest.fail("a block was read"))
    assert say(engine, prompt) == (text, 120 - 1 - 16)
    engine.release()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_one_line_and_is_repaired(
    engine, other, prompt, text, damage, tmp_path, caplog
):
    """Also one that is half written: the second of three."""
    ask(engine, prompt, tmp_path)
    engine.open_kv_store(str(tmp_path), LARGE)
    names = [Path(it).name for it in engine._pool.store._paths(prompt, "")]
    engine.release()
    block = tmp_path / names[1]
    whole = block.read_bytes()
    block.write_bytes(DAMAGE[damage](whole))
    assert ask(other, prompt, tmp_path) == (text, BLOCK)
    [record] = caplog.records
    assert "KV store" in record.message
    assert "\n" not in record.message
    assert block.read_bytes() == whole
    assert ask(engine, prompt, tmp_path) == (text, 3 * BLOCK)


def test_a_block_of_another_model_context_or_place_is_not_used(
    engine, prompt, text, tmp_path, caplog
):
    """Its name is another one; and if somebody copies it, its header tells."""
    strange = minitri.load(write_hf_folder(tmp_path / "m", seed=8), device="cpu", dtype="float32")
    ask(strange, prompt, tmp_path / "strange")
    ask(engine, prompt, tmp_path / "ours")
    ask(engine, [*prompt[BLOCK:], *prompt], tmp_path / "later")  # blocks with the same tokens
    others = {folder: paths(tmp_path / folder) for folder in ("strange", "later")}
    assert ask(engine, prompt, tmp_path / "strange") == (text, 0)
    assert not caplog.records
    ours = {snapshot_tokens(it): it for it in paths(tmp_path / "ours")}
    for some in others.values():
        caplog.clear()
        for path in some:
            if (place := ours.get(snapshot_tokens(path))) is not None:
                shutil.copy(path, place)
        assert ask(engine, prompt, tmp_path / "ours")[0] == text
        assert len(caplog.records) == 1


def snapshot_tokens(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return tuple(file.get_tensor("tokens").tolist())


def test_engines_that_round_otherwise_share_nothing(engine, prompt, text, tmp_path, monkeypatch):
    ask(engine, prompt, tmp_path)
    origin = origin_of(engine.model)
    for change in ({"computed_by": "another processor"}, {"fingerprint": "another model"}):
        changed = replace(origin, **change)
        store = kv_store.KVStore(str(tmp_path), LARGE, changed)
        assert not {*store._paths(prompt, "")} & {*paths(tmp_path)}
    store = kv_store.KVStore(str(tmp_path), LARGE, origin)
    assert {*store._paths(prompt, "")} == {*paths(tmp_path)}
    assert not {*store._paths(prompt, "key 1")} & {*store._paths(prompt, "key 2")}


def test_on_a_full_disk_texts_are_those_of_old_with_one_line(
    engine, prompt, text, tmp_path, caplog
):
    """Files may not grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9999, limits[1]))
    try:
        assert ask(engine, prompt, tmp_path) == (text, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [record] = caplog.records
    assert "File too large" in record.message
    assert not [*tmp_path.iterdir()]
    assert ask(engine, prompt, tmp_path) == (text, 0)
    assert ask(engine, prompt, tmp_path) == (text, 3 * BLOCK)


def test_on_a_disk_without_space_texts_are_those_of_old(engine, prompt, text, tmp_path, caplog):
    """A tmpfs with room for hardly more than a block."""
    ask(engine, prompt, tmp_path / "size")
    size = Path(paths(tmp_path / "size")[0]).stat().st_size
    small = tmp_path / "small"
    small.mkdir()
    command = f"mount -t tmpfs -o size={size * 3 // 2} none {small}"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        assert ask(engine, prompt, small) == (text, 0)
        [record] = caplog.records
        assert "No space left" in record.message
        assert ask(engine, prompt, small)[0] == text
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_of_two_who_write_one_block_both_read_it_whole(engine, other, prompt, text, url, caplog):
    """At the same time, again and again; a third one reads meanwhile."""
    engine.release()
    other.release()
    for each in (engine, other):
        each.open_kv_store(url, LARGE)
        say(each, prompt)
    stores = [engine._pool.store, other._pool.store]
    held = replace(engine._pool.held, tokens=prompt[:119])

    def write(store):
        for _ in range(30):
            store._known.clear()
            store.write(held)
        store.close()

    with ThreadPoolExecutor() as threads:
        works = [threads.submit(write, store) for store in stores]
        reader = kv_store.KVStore(url, LARGE, origin_of(engine.model))
        names = reader._paths(prompt[:119], "")
        while not all(work.done() for work in works):
            for i, name in enumerate(names):
                reader._read(name, prompt[i * BLOCK :][:BLOCK])
    engine.release()
    other.release()
    assert ask(other, prompt, url) == (text, 3 * BLOCK)
    assert len(paths(url)) == 3
    assert not caplog.records


def test_of_a_snapshot_nobody_knows_who_computed_it(engine, other, prompt, tmp_path):
    engine.complete(prompt, max_new_tokens=1)
    engine.save_kv(tmp_path / "kv")
    other.load_kv(tmp_path / "kv")
    other.open_kv_store(str(tmp_path / "store"), LARGE)
    other.complete(prompt, max_new_tokens=1)
    other.release()
    assert not [*(tmp_path / "store").glob("*.kvblock")]


def test_a_block_that_cannot_be_copied_is_one_line(engine, prompt, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no memory")

    engine.open_kv_store(str(tmp_path), LARGE)
    monkeypatch.setattr(kv_store, "HeldRow", fail)
    room = engine._pool.store._room
    num_free = room._value
    assert engine.complete(prompt, max_new_tokens=3).token_ids
    assert room._value == num_free
    assert caplog.text.count("no memory") == 1


def test_what_was_used_last_stays(engine, other, tmp_path):
    """Of prompts of three blocks each; somebody else's files stay, too."""
    prompts = [random_prompt(engine.config, 120, seed=seed) for seed in range(6)]
    ask(engine, prompts[0], tmp_path)
    size = Path(paths(tmp_path)[0]).stat().st_size
    (tmp_path / "novel.kv").write_bytes(b"x" * size * 20)
    (tmp_path / ".minitri-x.unfinished").write_bytes(b"x" * size)
    os.utime(tmp_path / ".minitri-x.unfinished", (1, 1))
    for prompt in prompts[1:]:
        time.sleep(0.01)
        ask(engine, prompt, tmp_path, size=10 * size)
        assert len(paths(tmp_path)) <= 10
        time.sleep(0.01)
        assert ask(other, prompts[0], tmp_path, size=10 * size)[1] == 3 * BLOCK
    assert ask(other, prompts[5], tmp_path)[1] == 3 * BLOCK
    assert ask(other, prompts[1], tmp_path)[1] == 0
    assert (tmp_path / "novel.kv").exists()
    assert not (tmp_path / ".minitri-x.unfinished").exists()


def test_tokens_do_not_wait_for_a_slow_store(engine, prompt, text, tmp_path, monkeypatch):
    """With no more blocks on their way than there is room for."""
    may_write, whole = threading.Event(), kv_store.write_snapshot

    def write(*arguments):
        may_write.wait(20)
        return whole(*arguments)

    monkeypatch.setattr(kv_store, "write_snapshot", write)
    monkeypatch.setattr(kv_store, "WAITING_BYTES", 20_000)
    engine.release()
    engine.open_kv_store(str(tmp_path), LARGE)
    assert say(engine, prompt) == (text, 0)
    assert not paths(tmp_path)
    assert engine._pool.store.writer._work_queue.qsize() < 3
    may_write.set()
    engine.release()
    assert 0 < len(paths(tmp_path)) < 3
    ask(engine, prompt, tmp_path)
    ask(engine, prompt, tmp_path)
    assert len(paths(tmp_path)) == 3


def test_a_run_that_goes_on_after_its_store_was_closed_ends_well(engine, prompt, text, tmp_path):
    engine.release()
    engine.open_kv_store(str(tmp_path), LARGE)
    run = engine.generate([prompt], max_new_tokens=3)
    engine.release()
    run.result()
    assert not paths(tmp_path)


@pytest.mark.parametrize(("url", "words"), [("nonsense://x", "nonsense"), ("/dev/null/x", "Not a")])
def test_a_url_that_cannot_be_opened_is_one_line(engine, url, words):
    with pytest.raises(InputError, match="kv_store is .*cannot be opened.*pip install") as error:
        engine.open_kv_store(url, LARGE)
    assert words in str(error.value)
    with pytest.raises(InputError, match="neither saved nor loaded"):
        tiny_engine().open_kv_store("memory://x", LARGE)


def test_files_are_their_owners(engine, prompt, tmp_path):
    ask(engine, prompt, tmp_path)
    assert {Path(it).stat().st_mode & 0o777 for it in paths(tmp_path)} == {0o600}


def test_the_chat_writes_to_the_store_what_a_later_one_reads(
    folder, tmp_path, call, monkeypatch, caplog
):
    document = tmp_path / "a.txt"
    document.write_text("She had been forced into prudence in her youth. " * 6)
    words = ["--model", folder, "--device", "cpu", "--document", document, "--kv-store", tmp_path]
    words += ["--seed", 1, "--temperature", 0, "--max-new-tokens", 8, "--verbose"]
    answers = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n"))
        done = call(chat, *words)
        assert done.code == 0, done.err
        answers.append(done.out)
        monkeypatch.setattr(kv_store, "write_snapshot", lambda *_: pytest.fail("it is written"))
    assert answers[0] == answers[1]
    assert len(paths(tmp_path)) > 2
    assert "KV store" not in done.err


def test_ctrl_c_while_blocks_are_written_leaves_cleanly(folder, tmp_path):
    command = [sys.executable, "-m", "minitri.generate", "--model", str(folder), "--device", "cpu"]
    command += ["--prompt", "prudence in her youth, " * 40, "--max-new-tokens", "100"]
    command += [
        "--max-prompt-tokens",
        "400",
        "--kv-store",
        str(tmp_path),
        "--ignore-eos",
        "--method",
        "autoregressive",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--quiet"], **pipes) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert (process.returncode in (0, 130), told) == (True, "")
    assert {it.suffix for it in tmp_path.iterdir()} == {".kvblock"}
