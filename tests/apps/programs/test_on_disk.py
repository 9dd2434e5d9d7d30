"""`minitri pull`, `list` and `remove`: what the hub's own library sees in a cache, and deletes."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from minitri import InputError
from minitri import __main__ as command
from minitri.apps import plan
from minitri.files.fetch import WHEEL_MEMBER, locate

HASH = "0123456789" * 4
CONFIG = '{"model_type": "llama"}'
OTHER = "not whole, or not for minitri"
MISSING = "is not on this machine, and HF_HUB_OFFLINE"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, which cannot be reached, and an empty folder for wheels."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "wheels"))
    return tmp_path / "hub"


def add(cache: Path, repo: str, files: dict[str, bytes | str]) -> Path:
    """A repository as the hub's library leaves it: blobs, links to them, the commit of main."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / HASH
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs/main").write_text(HASH)
    for n, (name, content) in enumerate(files.items()):
        blob = home / "blobs" / f"{n:064x}"
        blob.write_bytes(content.encode() if isinstance(content, str) else content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return home


def add_wheel(cache: Path) -> Path:
    file = cache.parent / "wheels/smollm2-135m" / Path(WHEEL_MEMBER).name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF" * 500_000)
    return file


def listed(call) -> dict[str, tuple[str, str]]:
    """Size and state by name."""
    rows = call(command.main, "list").out.splitlines()[:-2]
    return {row[:24].strip(): (row[24:35].strip(), row[37:67].strip()) for row in rows}


def test_a_list_tells_sizes_states_and_places(cache, call):
    done = call(command.main, "list")
    assert (done.code, done.out.splitlines()[0].split()) == (0, ["together", "0.0", "MB"])
    ready = {"config.json": CONFIG, "model.safetensors": bytes(10**6)}
    whole = add(cache, "JackFram/llama-68m", ready)
    (whole / "blobs/55.incomplete").write_bytes(b"what an earlier attempt left")
    add(cache, "some/bert", {"config.json": '{"model_type": "bert"}', "model.safetensors": b"1"})
    add(cache, "some/planned", {"config.json": CONFIG})
    half = add(cache, "some/half", {"config.json": CONFIG})
    (half / "blobs/77.incomplete").write_bytes(bytes(5 * 10**6))
    index = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "one.safetensors": b"1"}
    add(cache, "some/shard", files)
    broken = add(cache, "some/broken", {"config.json": CONFIG})
    (broken / "blobs" / f"{0:064x}").unlink()
    shutil.copytree(cache / "models--some--planned", cache / "datasets--some--data")
    add_wheel(cache)
    assert listed(call) == {
        "llama-68m": ("1.0 MB", "ready"),
        "smollm2-135m": ("2.0 MB", "ready"),
        "some/bert": ("0.0 MB", OTHER),
        "some/broken": ("0.0 MB", OTHER),
        "some/half": ("5.0 MB", OTHER),
        "some/shard": ("0.0 MB", OTHER),
        "some/planned": ("0.0 MB", OTHER),
    }
    done = call(command.main, "list")
    assert str(cache) in done.out.splitlines()[-1]
    assert "HF_HOME" in done.out.splitlines()[-1]
    assert done.err == ""
    for name in ("pull", "list", "remove"):
        help_text = call(command.main, name, "--help").out
        assert f"  minitri {name}" in help_text
        assert str(cache) in help_text


def test_what_is_removed_is_that_model_alone(cache, call, tmp_path):
    """Not what its links point to, nor a repository of another name with the same commits."""
    secret = tmp_path / "elsewhere.safetensors"
    secret.write_bytes(b"mine")
    files = {"config.json": CONFIG, "model.safetensors": b"weights"}
    home, other = add(cache, "a/b", files), add(cache, "a/renamed", files)
    (home / "snapshots" / HASH / "more.safetensors").symlink_to(secret)
    linked = cache / "models--a--linked"
    linked.symlink_to(shutil.copytree(other, tmp_path / "linked", symlinks=True))
    wheel = add_wheel(cache)
    before = {*listed(call)}
    for name in (str(home), "../a/b", "models--a--b", "a", str(wheel)):
        assert "no model" in call(command.main, "remove", name).err
    assert {*listed(call)} == before
    for name in ("a/b", "a/linked", "smollm2-135m"):
        assert call(command.main, "remove", name).code == 0
    assert {*listed(call)} == {"a/renamed"}
    assert (home.exists(), other.exists(), wheel.exists()) == (False, True, False)
    assert (tmp_path / "linked/refs/main").read_text() == HASH
    assert secret.read_bytes() == b"mine"


def test_a_pull_ends_with_the_files_and_never_with_half_of_them(cache, call):
    """Without a hub what is whole stays usable, and the default model is that of its wheel."""
    add(cache, "a/whole", {"config.json": CONFIG, "model.safetensors": b"weights"})
    add(cache, "a/half", {"config.json": CONFIG})
    done = call(command.main, "pull", "a/whole")
    assert (done.code, done.out.split(" in ")[0]) == (0, "a/whole: 0.0 MB")
    for name in ("a/half", "a/missing"):
        done = call(command.main, "pull", name)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert f"{name} {MISSING}" in done.err
    wheel = add_wheel(cache)
    assert str(wheel) in call(command.main, "pull", "smollm2-135m", "-q").out


def test_a_plan_needs_the_config_alone(cache, call, folder):
    """Of a repository in the cache; one that cannot be had is a line."""
    home = add(cache, "a/b", {"config.json": (folder / "config.json").read_text()})
    done = call(plan.main, "--model", "a/b", "--gpu", "t4", "--draft", "suffix", "--json")
    assert (done.code, done.json["model"], done.json["model_context"]) == (0, "a/b", 512)
    assert not [*home.glob("snapshots/*/*.safetensors")]
    done = call(plan.main, "--model", "a/c")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"a/c {MISSING}" in done.err


def test_a_config_alone_is_not_taken_for_a_model(cache, folder):
    add(cache, "a/b", {"config.json": CONFIG})
    with pytest.raises(InputError, match=f"a/b {MISSING}"):
        locate("a/b")
