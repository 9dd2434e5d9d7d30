"""Kernels are built once per machine, never wrong; one line where it cannot be done."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitri.core.errors import InputError
from minitri.devices.cpu import build, kernels
from minitri.devices.cpu.build import load_library
from tests.devices.cpu.conftest import BUILT

KERNELS = build.SOURCE  # in the tests another file takes its place
REAL = next((path for name in build.COMPILERS if (path := shutil.which(name))), "")
pytestmark = pytest.mark.skipif(not REAL, reason="needs a C++ compiler (c++, g++, clang++)")


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch, caplog) -> Path:
    """A library of one function that stands for the kernels, in a folder that is hard to quote."""
    file = tmp_path / "naïve folder's" / "tiny.cpp"
    file.parent.mkdir()
    file.write_text('extern "C" int answer() { return 42; }\n')
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(build, "SOURCE", file)
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "größer, 日本"))
    monkeypatch.delenv("CXX", raising=False)
    caplog.set_level("INFO", logger="minitri")
    return file


def test_where_there_is_a_compiler_there_are_kernels():
    """Tests of kernels are skipped where these are missing, as after a mistake in a struct."""
    assert BUILT is not None or os.environ.get("MINITRI_KERNELS") == "off"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "größer, 日本" / "kernels"


def set_compiler(script: str, folder: Path, monkeypatch) -> None:
    """Makes CXX a shell script, in which $out is the library to write, if one is."""
    file = folder / "compiler"
    out = 'out=""; for word; do [ "$last" = -o ] && out="$word"; last="$word"; done'
    file.write_text(f"#!/bin/sh\n{out}\n{script}\n")
    file.chmod(0o700)
    monkeypatch.setenv("CXX", str(file))


def test_a_library_is_built_once_for_each_source_compiler_and_processor(
    source, cache, tmp_path, monkeypatch, caplog
):
    def num_built() -> int:
        """How many libraries were built, after this one was asked for twice."""
        assert load_library().answer() == load_library().answer() == 42
        return len(caplog.messages)

    assert num_built() == len([*cache.iterdir()]) == 1  # nothing unfinished stays
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # of a container without a compiler
        assert num_built() == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    (source.parent / "new.h").touch()
    assert num_built() == 2
    # A compiler that does not know native flags does without.
    script = f'case "$1" in -march=*) echo "unknown" >&2; exit 1;; esac; exec {REAL} $EXTRA "$@"'
    set_compiler(script, tmp_path, monkeypatch)
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    for number, macro, text in (
        (3, "", "flags\t: 1\ncpu MHz\t: 1\n"),
        (4, "", "flags\t: 2\n"),  # of another processor
        (4, "", "flags\t: 1\ncpu MHz\t: 2\n"),
        (5, "", "isa\t: rv64\n"),  # which says too little: macros do
        (6, "-D__NEW_INSTRUCTIONS__", "isa\t: rv64\n"),
    ):
        build.CPUINFO.write_text(text)
        monkeypatch.setenv("EXTRA", macro)
        assert num_built() == number


def test_fewer_instructions_are_another_library_and_unknown_ones_are_refused(
    source, tmp_path, monkeypatch
):
    load_library()
    monkeypatch.setenv("MINITRI_KERNELS", "avx2")
    assert not build.built_library().exists()
    script = f'case "$1" in -march=*) exit 1;; esac; exec {REAL} "$@"'
    set_compiler(script, tmp_path, monkeypatch)
    with pytest.raises(OSError, match="compiler"):  # it knows no AVX2, and does not do without
        load_library()
    monkeypatch.setenv("MINITRI_KERNELS", "avx9")
    with pytest.raises(InputError, match="avx9"):
        kernels._load_once.__wrapped__()


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="needs the compiler of the wheel ziglang")
def test_the_kernels_compile_for_arm(tmp_path):
    """Clang compiles them for NEON; nothing runs them here."""
    target = ["-target", "aarch64-linux-gnu", "-O0", "-Wno-psabi", "-Werror=return-type"]
    command = [sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-c", *target]
    subprocess.run([*command, KERNELS, "-o", tmp_path / "kernels.o"], check=True)
    assert b"NEON" in (tmp_path / "kernels.o").read_bytes()


ANSWERS = {level: number for number, level in enumerate(build.LEVELS)}


@pytest.fixture
def wheel(source, tmp_path, monkeypatch) -> Path:
    """A library for each level, with an answer of its own, next to the source, as in a wheel; the
    file that stands for /proc/cpuinfo."""
    for level, number in ANSWERS.items():
        file = source.with_name(build.wheel_name(level, "compiler2.1"))
        code = f'extern "C" int answer() {{ return {number}; }}'
        subprocess.run([REAL, *build.FLAGS, "-xc++", "-", "-o", file], input=code.encode())
    monkeypatch.setattr(build, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("PATH", "")
    return build.CPUINFO


def test_the_best_library_of_a_wheel_that_the_processor_can_run_is_loaded(
    source, wheel, cache, monkeypatch
):
    """Without a compiler, and without the cache. Each computes by bits of its own."""
    identities = set()
    for level, number in ANSWERS.items():
        wheel.write_text(f"processor\t: 0\nflags\t\t: fpu {build.LEVELS[level]}\n")
        library = load_library()
        assert library.answer() == number
        identities.add(build.identity(library))
    assert len(identities) == len(ANSWERS)
    wheel.write_text(f"flags\t: {build.LEVELS['amx']}\n")
    monkeypatch.setenv("MINITRI_KERNELS", "avx512")
    assert load_library().answer() == ANSWERS["avx512"]
    assert not cache.exists()


@pytest.mark.parametrize("case", ["below v3", "damaged", "CXX", "other sources"])
def test_where_no_library_of_a_wheel_fits_one_is_built(case, source, wheel, cache, monkeypatch):
    words = build.LEVELS["avx2"]
    wheel.write_text(f"flags\t: {words.replace('avx2', 'avx') if case == 'below v3' else words}\n")
    if case == "damaged":
        for file in source.parent.glob("*avx2*.so"):
            file.write_bytes(bytes(9999))
    if case == "other sources":
        (source.parent / "new.h").touch()
    if case != "CXX":
        with pytest.raises(OSError, match="apt install"):
            load_library()
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CXX", REAL)
    assert load_library().answer() == 42
    assert len([*cache.iterdir()]) == 1


@pytest.mark.parametrize("damage", ["empty", "garbage", "folder", "others may write", "no folder"])
def test_a_damaged_library_or_cache_is_not_used(damage, source, cache, monkeypatch, caplog):
    load_library()
    [library] = cache.iterdir()
    if damage == "others may write":
        cache.chmod(0o777)
    elif damage == "no folder":
        monkeypatch.setenv("MINITRI_WEIGHTS", "~nobody-has-this-name/cache")
    else:
        library.unlink()  # this process has it mapped
        library.mkdir() if damage == "folder" else library.write_bytes(bytes(9999))
    if damage == "empty":
        library.write_bytes(b"")
    assert load_library().answer() == 42
    assert caplog.text.count("building") == 2
    assert caplog.text.count("cannot store") == (damage not in ("empty", "garbage"))
    assert [*Path(tempfile.gettempdir()).iterdir()] == []


@pytest.mark.parametrize(
    "script",
    [
        "echo warning; echo 'fatal error: no licence' >&2; exit 1",
        "printf '\\377\\n\\n' >&2; exit 1",
        "exit 0",
        '[ -z "$out" ] || echo garbage > "$out"',
        *("/no/such/compiler", "'unbalanced", "/"),
    ],
)
def test_a_compiler_that_is_broken_or_not_there_is_one_line(
    script, cache, monkeypatch, tmp_path, caplog
):
    caplog.set_level("WARNING", logger="minitri")
    if script.startswith(("/", "'")):
        monkeypatch.setenv("CXX", script)
    else:
        set_compiler(script, tmp_path, monkeypatch)
    assert kernels._load_once.__wrapped__() is None
    [line] = caplog.messages
    assert "CXX" in line
    assert "\n" not in line
    assert ("no licence" in line) == ("no licence" in script)
    assert not cache.exists() or [*cache.iterdir()] == []
