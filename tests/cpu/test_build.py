"""Building the kernels: once per machine, never a wrong library, never more than one line where it
cannot be done."""

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from minitri.cpu import build
from minitri.cpu.build import BuildError, load_library

REAL = next((path for name in build.COMPILERS if (path := shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not REAL, reason="needs a C++ compiler (c++, g++, clang++)")
PROGRAM = """
import logging, sys
from pathlib import Path
from minitri.cpu.build import load_library
logging.basicConfig(level="INFO", format="%(message)s")
print(load_library(Path(sys.argv[1])).answer())
"""


@pytest.fixture
def source(tmp_path) -> Path:
    """A library of one function, `answer`, in a folder whose name is hard to quote."""
    file = tmp_path / "naïve folder's" / "tiny.cpp"
    file.parent.mkdir()
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MINITRI_WEIGHTS", str(tmp_path / "größer, 日本"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "größer, 日本" / "kernels"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes CXX a shell script; `num_builds` counts how often it was to write a library."""
    log, script = tmp_path / "log", tmp_path / "compiler"

    def set_script(text: str) -> None:
        out = 'out=""; for word; do [ "$last" = -o ] && out="$word"; last="$word"; done'
        script.write_text(f"#!/bin/sh\necho $* >> {shlex.quote(str(log))}\n{out}\n{text}\n")
        script.chmod(0o700)

    set_script(f'exec {REAL} $EXTRA "$@"')
    monkeypatch.setenv("CXX", str(script))
    set_script.num_builds = lambda: log.read_text().count(" -o ")
    return set_script


def start(source: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, source]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_compiler
def test_a_library_is_built_once_and_found_again(source, cache, compiler, caplog):
    caplog.set_level("INFO", logger="minitri")
    old = os.umask(0)
    try:
        assert [load_library(source).answer() for _ in range(2)] == [42, 42]
    finally:
        os.umask(old)
    assert compiler.num_builds() == len(caplog.messages) == 1
    assert len(list(cache.iterdir())) == 1  # nothing unfinished stays
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.parametrize("change", ["source", "header", "arguments", "compiler or processor"])
def test_a_library_of_another_source_compiler_or_processor_is_not_found(
    change, source, compiler, monkeypatch
):
    load_library(source)
    with monkeypatch.context() as elsewhere:
        if change == "source":
            source.write_text('extern "C" int answer() { return 43; }\n')
        elif change == "header":
            (source.parent / "new.h").touch()
        elif change == "arguments":
            elsewhere.setenv("CXX", f"{os.environ['CXX']} -g")
        else:  # another after the same name: it defines other macros
            elsewhere.setenv("EXTRA", "-D__NEW_INSTRUCTIONS__")
        assert load_library(source).answer() == (43 if change == "source" else 42)
    assert compiler.num_builds() == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "garbage", "folder", "others could have written it"])
def test_a_damaged_library_is_built_again(damage, source, cache, compiler):
    start(source).communicate()
    [library] = cache.iterdir()
    if damage.startswith("others"):
        cache.chmod(0o777)
    else:
        library.unlink()
    if damage == "folder":
        library.mkdir()
    elif damage in ("empty", "garbage"):
        library.write_bytes({"empty": b"", "garbage": bytes(9999)}[damage])
    assert load_library(source).answer() == 42
    assert compiler.num_builds() == 2


@needs_compiler
@pytest.mark.parametrize("obstacle", ["below a file", "others may write", "no home"])
def test_without_a_cache_folder_nothing_stays(obstacle, source, cache, tmp_path, monkeypatch):
    if obstacle == "below a file":
        cache.parent.write_text("a file")
    elif obstacle == "others may write":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    else:
        monkeypatch.setenv("MINITRI_WEIGHTS", "~nobody-has-this-name/cache")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    answer, messages = start(source).communicate()
    assert answer == "42\n"
    assert "cannot store the CPU kernels: " in messages
    assert list(temporary.iterdir()) == []
    assert obstacle != "others may write" or list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo warning; echo 'fatal error: no licence' >&2; exit 1", "no licence"),
        (f'echo "#error missing" | {REAL} -x c++ -c -', "missing"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "exit code -9"),
        ("printf '\\377\\n\\n' >&2; exit 1", "failed"),
        ("exit 0", "cannot be loaded"),
        ('[ -z "$out" ] || echo garbage > "$out"', "cannot be loaded"),
        ('[ -z "$out" ] || : > "$out"', "cannot be loaded"),
        ('[ -z "$out" ] || mkdir "$out"', "cannot be loaded"),
    ],
)
def test_a_broken_compiler_is_one_line_that_says_why(script, reason, source, cache, compiler):
    compiler(script)
    with pytest.raises(BuildError, match=reason) as caught:
        load_library(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize("command", ["/no/such/compiler", "'unbalanced", "/", None])
def test_a_compiler_that_is_not_there_is_one_line(command, source, monkeypatch, tmp_path):
    if command is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match="CXX" if command else r"apt install g\+\+"):
        load_library(source)


@needs_compiler
def test_a_compiler_that_does_not_know_native_flags_does_without(source, compiler):
    compiler(f'case "$1" in -march=*) echo "unknown" >&2; exit 1;; esac; {REAL} "$@"')
    assert [load_library(source).answer() for _ in range(2)] == [42, 42]
    assert compiler.num_builds() == 2  # the first try has failed
