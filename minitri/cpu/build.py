"""Builds the CPU kernels: compiles one C++ file for this very machine when it is first needed.

A library's name holds two digests. One is of all that it depends on: the source, the flags, and the
compiler, its library and the processor's instructions, as the compiler's own macros state them. So
a library that another machine or version has left in a shared folder is not found. The other is of
its content: a damaged library is not loaded but built again. No unfinished file gets its final
name, so processes that build at once do no harm.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
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

    Where the cache cannot be written to, the library lasts as long as this process.
    """
    compiler, code = _compiler(), source.read_text(encoding="utf-8")
    macros = _compile(compiler, ["-E", "-dM"], "#include <cstdlib>\n")
    depends_on = [code, *compiler, *FLAGS, *sorted(macros.splitlines()), _instructions()]
    stem = f"{source.stem}-{_digest(chr(0).join(depends_on).encode())}"
    if (cached := _cached(stem)) is not None:
        return cached
    library, problem = _build(compiler, code, macros), ""
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


def _cached(stem: str) -> Path | None:
    with suppress(OSError, InputError):
        for path in _cache_folder().glob(f"{stem}-*.so"):
            if path.stem.endswith(_digest(path.read_bytes())):
                ctypes.CDLL(str(path))
                return path
            path.unlink()
    return None


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


def _build(compiler: list[str], code: str, macros: str) -> bytes:
    version = re.search(r'__VERSION__ ".*?(\d[\d.]*)', macros)
    name = " ".join([*compiler, version[1] if version else "of an unknown version"])
    log.info("building the CPU kernels with %s (once, some seconds)", name)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            built = Path(folder) / "library"
            _compile(compiler, [*FLAGS, "-o", str(built)], code)
            library = built.read_bytes()
    except OSError as error:
        problem = shorten(error.strerror, 90)
        raise BuildError(f"{name} wrote no library ({problem}); name another in CXX") from None
    log.info("built the CPU kernels in %.1f s", time.perf_counter() - started)
    return library


def _compile(compiler: list[str], flags: list[str], code: str) -> str:
    """Standard output of the compiler, made to use all of this processor if it knows how."""
    for native in NATIVE:
        status, output, errors = _run([*compiler, *native, *flags, "-x", "c++", "-"], code)
        if status == 0:
            return output
    told = re.findall(r"^.*(?:error|cannot|undefined).*$", errors, re.M) or errors.split("\n")
    problem = shorten(told[0], 100) or f"exit code {status}"
    raise BuildError(f"{' '.join(compiler)} failed ({problem}); repair it, or name another in CXX")


def _run(command: list[str], code: str) -> tuple[int, str, str]:
    pipe, in_english = subprocess.PIPE, {**os.environ, "LC_ALL": "C"}
    try:
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=in_english, process_group=0,
            encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            try:
                output, errors = process.communicate(code, timeout=TIMEOUT_SECONDS)
            except BaseException:  # Ctrl-C, too: nothing that the compiler started may go on
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{command[0]} did not finish within {TIMEOUT_SECONDS} s; name another in CXX"
        ) from None
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}); correct CXX") from None
    return process.returncode, output, errors


def _instructions() -> str:
    """The processor's, as Linux lists them; elsewhere the macros must do."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as cpuinfo:
        return "".join(re.findall(r"^(?:flags|Features|isa)\b.*", cpuinfo.read(8192), re.M)[:1])
    return ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
