"""Building the kernels: once per machine, never a wrong or damaged library, never more than one
line where it cannot be done."""

import ctypes
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from minitri.cpu import build
from minitri.cpu.build import BuildError, shared_library

REAL = next((path for name in build.COMPILERS if (path := shutil.which(name))), "")
needs_compiler = pytest.mark.skipif(not REAL, reason="needs a C++ compiler (c++, g++, clang++)")
ADVICE = r"(install one|repair it|name another|correct)"


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
    log, script = tmp_path / "log", tmp_path / "my compiler"

    def set_script(text: str) -> None:
        written = (
            f'out=""; for word; do [ "$last" = -o ] && out="$word"; last="$word"; done\n{text}'
        )
        script.write_text(f"#!/bin/sh\necho $* >> {shlex.quote(str(log))}\n{written}\n")
        script.chmod(0o700)

    set_script(f'exec {REAL} $EXTRA "$@"')
    monkeypatch.setenv("CXX", shlex.quote(str(script)))
    set_script.num_builds = lambda: log.read_text().count(" -o ")
    return set_script


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


@needs_compiler
def test_a_library_is_built_once_and_found_again(source, cache, compiler, caplog):
    caplog.set_level("INFO", logger="minitri")
    library = shared_library(source)
    assert answer(library) == 42
    assert library.parent == cache
    assert shared_library(source) == library
    assert compiler.num_builds() == 1
    [message] = caplog.messages
    assert message.startswith("building the CPU kernels with ")
    assert list(cache.iterdir()) == [library]  # nothing unfinished stays


@needs_compiler
def test_only_its_owner_can_write_to_a_new_cache_folder(source, cache):
    old = os.umask(0)
    try:
        shared_library(source)
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
@pytest.mark.parametrize("change", ["source", "arguments", "compiler", "processor"])
def test_a_library_of_another_source_compiler_or_processor_is_not_found(
    change, source, compiler, monkeypatch
):
    first = shared_library(source)
    with monkeypatch.context() as elsewhere:
        if change == "source":
            source.write_text('extern "C" int answer() { return 43; }\n')
        elif change == "arguments":
            elsewhere.setenv("CXX", f"{os.environ['CXX']} -g")
        elif change == "compiler":  # another after the same name: it defines other macros
            elsewhere.setenv("EXTRA", "-D__NEW_INSTRUCTIONS__")
        else:
            elsewhere.setattr(build, "_instructions", lambda: "flags: fpu sse")
        second = shared_library(source)
    assert second != first
    assert answer(second) == (43 if change == "source" else 42)
    assert compiler.num_builds() == 2
    assert first.exists()  # its machine finds it again


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "folder", "no library"])
def test_a_damaged_library_is_built_again(damage, source, compiler):
    library = shared_library(source)
    content = library.read_bytes()
    library.unlink()  # it is in use: overwriting it in place would crash this process
    if damage == "folder":
        library.mkdir()
    elif damage == "no library":  # written and named as if whole
        stem = library.stem.rpartition("-")[0]
        library.with_name(f"{stem}-{build._digest(b'text')}.so").write_bytes(b"text")
    else:
        half = content[: len(content) // 2]
        library.write_bytes({"truncated": half, "empty": b"", "garbage": bytes(9999)}[damage])
    assert answer(shared_library(source)) == 42
    assert compiler.num_builds() == 2


@needs_compiler
@pytest.mark.parametrize("obstacle", ["below a file", "others may write", "no home"])
def test_without_a_cache_folder_the_library_lasts_as_long_as_the_process(
    obstacle, source, cache, tmp_path, monkeypatch
):
    if obstacle == "below a file":
        cache.parent.write_text("a file")
    elif obstacle == "others may write":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    else:
        monkeypatch.setenv("MINITRI_WEIGHTS", "~nobody-has-this-name/cache")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = (
        "import ctypes, logging, sys\nfrom pathlib import Path\nfrom minitri.cpu.build import *\n"
        "logging.basicConfig(level='INFO', format='%(message)s')\n"
        "library = shared_library(Path(sys.argv[1]))\n"
        "assert ctypes.CDLL(str(library)).answer() == 42\n"
        "print(library)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = Path(done.stdout.rstrip("\n"))
    assert library.parent.name.startswith("minitri-")
    assert not library.parent.exists()
    assert "cannot store the CPU kernels: " in done.stderr
    assert obstacle != "others may write" or list(cache.iterdir()) == []


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(source, cache, compiler):
    library = shared_library(source)
    cache.chmod(0o777)
    assert shared_library(source) != library
    assert compiler.num_builds() == 2


@needs_compiler
def test_processes_that_build_at_once_do_no_harm(source, cache, compiler, tmp_path):
    meeting = shlex.quote(str(tmp_path / "meeting"))
    compiler(
        f'if [ "$out" ]; then mkdir -p {meeting}; touch {meeting}/$$\n'
        f"while [ $(ls {meeting} | wc -l) -lt 2 ]; do sleep 0.01; done; fi\n"
        f'exec {REAL} "$@"'
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom minitri.cpu.build import shared_library\n"
        "print(shared_library(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, source]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    libraries = [Path(process.communicate()[0].rstrip("\n")) for process in both]
    assert compiler.num_builds() == 2
    assert [answer(library) for library in libraries] == [42, 42]
    assert set(libraries) == set(cache.iterdir())


def test_no_compiler_is_one_line_that_says_what_to_install(source, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found .*apt install g\+\+"):
        shared_library(source)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo warning; echo 'fatal error: no licence' >&2; exit 1",
            r"\(fatal error: no licence\)",
        ),
        ("exit 3", r"failed \(exit code 3\)"),
        ("kill -9 $$", r"failed \(exit code -9\)"),
        ("printf '\\377\\n\\n' >&2; exit 1", "failed"),
        ("exit 0", "wrote no library"),
        ('[ -z "$out" ] || echo garbage > "$out"', "cannot be loaded"),
        ('[ -z "$out" ] || : > "$out"', "cannot be loaded"),
        ('[ -z "$out" ] || mkdir "$out"', "wrote no library"),
    ],
)
def test_a_broken_compiler_is_one_line_that_says_why(script, reason, source, cache, compiler):
    compiler(script)
    with pytest.raises(BuildError, match=reason) as caught:
        shared_library(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350
    assert caught.match(ADVICE)
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/compiler", "No such file"),
        ("'unbalanced", "No closing quotation"),
        ("/", "denied"),
    ],
)
def test_a_wrong_CXX_is_named(command, reason, source, monkeypatch):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=f"{reason}.*correct"):
        shared_library(source)


@needs_compiler
def test_an_error_in_the_source_is_quoted(source):
    source.write_text("int f() { return missing; }\n")
    with pytest.raises(BuildError, match=r"error: .*missing"):
        shared_library(source)


@needs_compiler
def test_CXX_may_have_arguments_and_blank_stands_for_none(source, compiler, monkeypatch):
    source.write_text('extern "C" int answer() { return NUMBER; }\n')
    monkeypatch.setenv("CXX", f"env EXTRA=-DNUMBER=7 {os.environ['CXX']}")
    assert answer(shared_library(source)) == 7
    source.write_text('extern "C" int answer() { return 8; }\n')
    monkeypatch.setenv("CXX", " ")
    assert answer(shared_library(source)) == 8


@needs_compiler
@pytest.mark.parametrize("unknown", ["-march=*", "-m*=native"])
def test_a_compiler_that_does_not_know_native_flags_does_without(unknown, source, compiler):
    compiler(f'case "$1" in {unknown}) echo "unknown argument" >&2; exit 1;; esac; {REAL} "$@"')
    library = shared_library(source)
    assert answer(library) == 42
    assert shared_library(source) == library
    assert compiler.num_builds() == (2 if unknown == "-march=*" else 3)


def test_a_compiler_that_hangs_is_stopped(source, compiler, monkeypatch):
    monkeypatch.setattr(build, "TIMEOUT_SECONDS", 0.2)
    compiler("sleep 5")
    with pytest.raises(BuildError, match=r"did not finish within 0\.2 s; name another"):
        shared_library(source)
