"""Builds the CPU kernels: compiles a C++ file for this very machine when it is first needed.

A library's name holds a digest of all that it depends on: the sources, the flags, the compiler and
the instructions for which it compiles here, as its macros state them. So a library that another
machine or version has left in a shared folder is not found. No unfinished file gets its final name.
"""

import ctypes
import hashlib
import logging
import os
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


class BuildError(RuntimeError):
    """The kernels cannot be built; one line says why and what to do."""


def load_library(source: Path) -> ctypes.CDLL:
    """What a C++ file and the headers of its folder define, built if the cache does not have it.

    Where the cache cannot be written to, it is built for this process. Raises `BuildError`.
    """
    compiler = _compiler()
    code, *headers = (file.read_text("utf-8") for file in (source, *source.parent.glob("*.h")))
    macros = _compile(compiler, ["-E", "-dM"], "#include <cstdlib>\n").splitlines()
    depends_on = [code, *sorted(headers), *compiler, *FLAGS, *sorted(macros)]
    digest = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()
    name = f"{source.stem}-{digest[:16]}.so"
    with suppress(OSError, InputError):
        return ctypes.CDLL(str(_cache_folder() / name))
    log.info("building the CPU kernels with %s (once, some seconds)", " ".join(compiler))
    with tempfile.TemporaryDirectory(prefix="minitri-", ignore_cleanup_errors=True) as folder:
        built = Path(folder) / name
        _compile(compiler, [*FLAGS, f"-I{source.parent}", "-o", str(built)], code)
        try:
            library = ctypes.CDLL(str(built))
        except OSError as error:
            problem = f"what {' '.join(compiler)} built cannot be loaded ({shorten(error, 90)})"
            raise BuildError(f"{problem}; name another in CXX") from None
        try:
            unfinished = Path(shutil.copy(built, _cache_folder() / f"{name}.{os.getpid()}"))
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())  # a library cut short by a crash would end every process
            unfinished.replace(_cache_folder() / name)
        except (OSError, InputError) as error:
            log.info("cannot store the CPU kernels: %s", shorten(error, 90))
    return library


def _compiler() -> list[str]:
    """The command, which may have arguments, as in CXX='ccache g++'."""
    chosen = os.environ.get("CXX", "").split()
    found = chosen or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found or os.name != "posix":
        raise BuildError(
            f"no C++ compiler was found ({', '.join(COMPILERS)}); install one (Debian: apt install "
            "g++, macOS: xcode-select --install)"
        )
    return found


def _compile(compiler: list[str], flags: list[str], code: str) -> str:
    """Standard output of the compiler, made to use all of this processor if it knows how."""
    name = " ".join(compiler)
    for native in (["-march=native"], []):
        command = [*compiler, *native, *flags, "-x", "c++", "-"]
        try:
            done = subprocess.run(command, input=code.encode(), capture_output=True, check=False)
        except OSError as error:
            raise BuildError(f"{name} cannot be run ({error.strerror}); correct CXX") from None
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    told = shorten(done.stderr.decode(errors="replace"), 120)
    problem = told or f"exit code {done.returncode}"
    raise BuildError(f"{name} failed ({problem}); repair it, or name another in CXX")


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
