"""Kernels are built once per machine, never wrong; one line where it cannot be done."""

import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitri.apps.cli.pytorch import import_pytorch
from minitri.core.errors import InputError
from minitri.devices.cpu import build, kernels
from minitri.devices.cpu.build import load_library

REAL = next((path for name in build.COMPILERS if (path := shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not REAL, reason="needs a C++ compiler (c++, g++, clang++)")


@pytest.fixture
def source(tmp_path, monkeypatch, caplog) -> Path:
    """A library of one function that stands for the kernels, in a folder that is hard to quote."""
    file = tmp_path / "naïve folder's" / "tiny.cpp"
    file.parent.mkdir()
    file.write_text('extern "C" int answer() { return 42; }\n')
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(kernels, "SOURCE", file)
    monkeypatch.delenv("CXX", raising=False)
    caplog.set_level("INFO", logger="minitri")
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "größer, 日本"))
    return tmp_path / "größer, 日本" / "kernels"


def set_compiler(script: str, folder: Path, monkeypatch) -> None:
    """Makes CXX a shell script, in which $out is the library to write, if one is."""
    file = folder / "compiler"
    out = 'out=""; for word; do [ "$last" = -o ] && out="$word"; last="$word"; done'
    file.write_text(f"#!/bin/sh\n{out}\n{script}\n")
    file.chmod(0o700)
    monkeypatch.setenv("CXX", str(file))


@needs_compiler
def test_a_library_is_built_once_for_each_source_compiler_and_processor(
    source, cache, tmp_path, monkeypatch, caplog
):
    old = os.umask(0)
    try:
        assert [load_library(source).answer() for _ in range(2)] == [42, 42]
    finally:
        os.umask(old)
    assert len(list(cache.iterdir())) == len(caplog.messages) == 1  # nothing unfinished stays
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert load_library(source).answer() == 43
    (source.parent / "new.h").touch()
    load_library(source)
    monkeypatch.setenv("CXX", f"{REAL} -g")
    load_library(source)
    # One that does not know native flags does without.
    script = f'case "$1" in -march=*) echo "unknown" >&2; exit 1;; esac; exec {REAL} $EXTRA "$@"'
    set_compiler(script, tmp_path, monkeypatch)
    load_library(source)
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    for name in ("flags", "stepping", "Features"):  # another processor, or one with more
        with build.CPUINFO.open("a") as file:
            file.write(f"{name}\t: 1\ncpu MHz\t: {name}\n")
        load_library(source)
    build.CPUINFO.write_text("model\t: 1\nisa\t: rv64\n")  # which says too little
    for macro in ("", "-D__NEW_INSTRUCTIONS__"):
        monkeypatch.setenv("EXTRA", macro)
        load_library(source)
        load_library(source)
    assert len(caplog.messages) == 10


@needs_compiler
def test_a_library_of_fewer_instructions_is_another_one(source, monkeypatch, caplog):
    libraries = set()
    for name in ("", "avx2", "avx512"):
        monkeypatch.setenv("MINITRI_KERNELS", name)
        libraries.add(build.built_library(source))
        if platform.machine() == "x86_64":
            assert load_library(source).answer() == 42
    assert len(libraries) == 3
    monkeypatch.setenv("MINITRI_KERNELS", "avx9")
    kernels._load_once.cache_clear()
    with pytest.raises(InputError, match="avx9; give avx2, avx512 or off"):
        kernels.load_kernels()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="needs the compiler of the wheel ziglang")
def test_the_kernels_compile_for_arm(tmp_path):
    """For NEON, by clang; nothing runs them here."""
    target = ["-target", "aarch64-linux-gnu", "-O0", "-Wno-psabi", "-Werror=return-type"]
    command = [sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-c", *target]
    done = subprocess.run(
        [*command, kernels.SOURCE, "-o", tmp_path / "kernels.o"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert b"NEON" in (tmp_path / "kernels.o").read_bytes()


@needs_compiler
def test_a_library_that_is_built_takes_no_compiler(source, cache, tmp_path, monkeypatch, caplog):
    """As in a container that was made with one. For another processor it is not used."""
    load_library(source)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library(source).answer() == 42
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(build, "SOURCE", source)
    import_pytorch()
    assert os.environ.pop("GOMP_SPINCOUNT") == "1000"
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    for text in ("flags\t: fpu\n", ""):
        build.CPUINFO.write_text(text)
        with pytest.raises(OSError, match="apt install"):
            load_library(source)
        import_pytorch()
        assert "GOMP_SPINCOUNT" not in os.environ
    assert len(caplog.messages) == 1


@needs_compiler
def test_threads_that_ask_at_once_get_the_same_kernels(source, request, caplog, monkeypatch):
    monkeypatch.setattr(kernels, "Kernels", lambda *_: object())
    request.addfinalizer(kernels._load_once.cache_clear)
    kernels._load_once.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: kernels.load_kernels(), range(4)))
    assert len(found) == len(caplog.messages) == 1


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "garbage", "folder", "others may write", "no folder"])
def test_a_damaged_library_or_cache_is_not_used(damage, source, cache, monkeypatch, caplog):
    load_library(source)
    [name] = (file.name for file in cache.iterdir())
    monkeypatch.setenv("MINITRI_WEIGHTS", str(cache.parent / "other"))
    library = cache.parent / "other" / "kernels" / name
    library.parent.mkdir(parents=True)
    if damage == "folder":
        library.mkdir()
    elif damage == "others may write":
        shutil.copy(cache / name, library)
        library.parent.chmod(0o777)
    elif damage == "no folder":
        monkeypatch.setenv("MINITRI_WEIGHTS", "~nobody-has-this-name/cache")
    else:
        library.write_bytes(bytes(9999 * (damage == "garbage")))
    assert load_library(source).answer() == 42
    assert caplog.text.count("building") == 2
    assert caplog.text.count("cannot store") == (damage not in ("empty", "garbage"))
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert damage != "others may write" or list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize(
    "script",
    [
        "echo warning; echo 'fatal error: no licence' >&2; exit 1",
        f'echo "#error missing" | {REAL} -x c++ -c -',
        "kill -9 $$",
        "printf '\\377\\n\\n' >&2; exit 1",
        "exit 0",
        '[ -z "$out" ] || echo garbage > "$out"',
        '[ -z "$out" ] || mkdir "$out"',
        *("/no/such/compiler", "'unbalanced", "/", ""),
    ],
)
def test_a_compiler_that_is_broken_or_not_there_is_one_line(
    script, source, cache, monkeypatch, tmp_path, caplog
):
    caplog.set_level("WARNING", logger="minitri")
    if script.startswith(("/", "'")):
        monkeypatch.setenv("CXX", script)
    elif script:
        set_compiler(script, tmp_path, monkeypatch)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert kernels._load_once.__wrapped__() is None
    [line] = caplog.messages
    assert "CXX" in line
    assert "\n" not in line
    assert len(line) < 350
    assert ("no licence" in line) == ("no licence" in script)
    assert not cache.exists() or list(cache.iterdir()) == []
