"""Builds the CPU kernels: compiles a C++ file for this very machine when it is first needed.

A library's name holds a digest of the sources, the flags, the compiler and the instructions for
which it compiles here, so that one of another machine or version is not found.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from minitri.errors import InputError, shorten
from minitri.folders import weights_folder
from minitri.log import log

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w")


def load_library(source: Path) -> ctypes.CDLL:
    """What a C++ file and the headers of its folder define, built if need be. Raises `OSError`."""
    # The command may have arguments, as in CXX='ccache g++'.
    compiler = os.environ.get("CXX", "").split() or [*filter(shutil.which, COMPILERS)][:1]
    if not compiler or os.name != "posix":
        raise OSError("none of c++, g++, clang++ is here; Debian: apt install g++")
    sources = (file.read_text("utf-8") for file in sorted(source.parent.glob("*.[ch]*")))
    macros = _compile(compiler, "-E", "-dM", "-include", "cstdlib", os.devnull).splitlines()
    depends_on = [*sources, *compiler, *FLAGS, *sorted(macros)]
    digest = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()
    name = f"{source.stem}-{digest[:16]}.so"
    with suppress(OSError, InputError):
        return ctypes.CDLL(str(_cache_folder() / name))
    log.info("building the CPU kernels (once, some seconds)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder, name)
        _compile(compiler, *FLAGS, str(source), "-o", str(built))
        library = ctypes.CDLL(str(built))
        try:
            unfinished = Path(shutil.copy(built, _cache_folder() / f"{name}.{os.getpid()}"))
            unfinished.replace(_cache_folder() / name)
        except (OSError, InputError) as error:
            log.info("cannot store the CPU kernels: %s", shorten(error, 90))
    return library


def _compile(compiler: list[str], *arguments: str) -> str:
    """Standard output of the compiler, made to use all of this processor if it knows how."""
    for native in (["-march=native"], []):
        command = [*compiler, *native, "-x", "c++", *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    told = shorten(done.stderr.decode(errors="replace"))
    raise OSError(f"{compiler[0]}: {told or done.returncode}")


def _cache_folder() -> Path:
    """A folder where nobody else can leave code; raises `OSError` or `InputError`."""
    folder = weights_folder() / "kernels"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"others can write to {folder}; delete it, or set MINITRI_WEIGHTS")
    return folder
