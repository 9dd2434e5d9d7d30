"""Builds the CPU kernels: compiles a C++ file for this very machine when it is first needed.

A library's name holds two digests. One is of all that it depends on: the sources, the flags, and
the compiler and the processor's instructions, as macros and Linux state them; so a library that
another machine or version has left in a shared folder is not found. The other is of its content: a
damaged library is not loaded but built again. No unfinished file gets its final name.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from minitri.errors import InputError, shorten
from minitri.folders import weights_folder

log = logging.getLogger("minitri")

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w")
NATIVE: tuple[list[str], ...] = (["-march=native"], ["-mcpu=native"], [])
"""Flags for all instructions of this processor, of which compilers know one, both or none."""
TIMEOUT_SECONDS = 120


class BuildError(RuntimeError):
    """The kernels cannot be built; one line says why and what to do."""


def shared_library(source: Path) -> Path:
    """A library that can be loaded here, built if the cache has none; raises `BuildError`.

    The source may include headers of its folder. Where the cache cannot be written to, the library
    lasts as long as this process.
    """
    compiler = _compiler()
    problem = ""
    macros = _compile(compiler, ["-E", "-dM"], "#include <cstdlib>\n")
    sources = [file.read_text("utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
    depends_on = [*sources, *compiler, *FLAGS, *sorted(macros.splitlines()), _instructions()]
    stem = f"{source.stem}-{_digest(chr(0).join(depends_on).encode())}"
    with suppress(OSError, InputError):
        for path in _cache_folder().glob(f"{stem}-*.so"):
            if path.stem.endswith(_digest(path.read_bytes())):
                ctypes.CDLL(str(path))
                return path
    log.info("building the CPU kernels with %s (once, some seconds)", " ".join(compiler))
    library = _build(compiler, [*FLAGS, f"-I{source.parent}"], sources[0])
    for folder in (_cache_folder, _temporary_folder):
        try:
            return _stored(library, folder() / f"{stem}-{_digest(library)}.so")
        except (OSError, InputError) as error:
            problem = shorten(error, 90)
            log.info("cannot store the CPU kernels: %s", problem)
    name = " ".join(compiler)
    raise BuildError(f"what {name} built cannot be loaded ({problem}); name another in CXX")


def _compiler() -> list[str]:
    """The command, which may have arguments, as in CXX='ccache g++'."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is no command ({error}); correct or unset it") from None
    found = chosen or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found or os.name != "posix":
        raise BuildError(
            f"no C++ compiler was found ({', '.join(COMPILERS)}); install one (Debian: apt install "
            "g++, macOS: xcode-select --install)"
        )
    return found


def _stored(library: bytes, path: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as unfinished:
        file = Path(unfinished) / path.name
        file.write_bytes(library)
        ctypes.CDLL(str(file))
        return file.replace(path)


def _cache_folder() -> Path:
    """A folder where nobody else can leave code; raises `OSError` or `InputError`."""
    folder = weights_folder() / "kernels"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
        raise PermissionError(
            f"other users can write to {folder}; delete it, or set MINITRI_WEIGHTS"
        )
    return folder


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="minitri-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _build(compiler: list[str], flags: list[str], code: str) -> bytes:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder) / "library"
        _compile(compiler, [*flags, "-o", str(built)], code)
        try:
            return built.read_bytes()
        except OSError as error:
            problem = f"{' '.join(compiler)} wrote no library ({shorten(error.strerror, 90)})"
            raise BuildError(f"{problem}; name another in CXX") from None


def _compile(compiler: list[str], flags: list[str], code: str) -> str:
    """Standard output of the compiler, made to use all of this processor if it knows how."""
    name = " ".join(compiler)
    done = None
    for native in NATIVE:
        command = [*compiler, *native, *flags, "-x", "c++", "-"]
        try:
            done = subprocess.run(
                command,
                input=code,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"{name} did not finish within {TIMEOUT_SECONDS} s"
            raise BuildError(f"{problem}; name another in CXX") from None
        except OSError as error:
            raise BuildError(f"{name} cannot be run ({error.strerror}); correct CXX") from None
        if done.returncode == 0:
            return done.stdout
    assert done is not None
    told = re.findall(r"^.*(?:error|cannot|undefined).*$", done.stderr, re.M)
    problem = shorten((told or done.stderr.split("\n"))[0], 100) or f"exit code {done.returncode}"
    raise BuildError(f"{name} failed ({problem}); repair it, or name another in CXX")


def _instructions() -> str:
    """The processor's, as Linux lists them; elsewhere the macros must do."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as cpuinfo:
        return "".join(re.findall(r"^(?:flags|Features|isa)\b.*", cpuinfo.read(8192), re.M)[:1])
    return ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
