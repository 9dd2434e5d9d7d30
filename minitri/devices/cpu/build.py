"""Builds the CPU kernels: compiles a C++ file for this processor when it is first needed.

The name of a library has a digest of the sources, flags, $CXX and instructions of the processor, so
that no library of another machine or version is used. A built library needs no compiler.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.devices.folders import weights_folder

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w")
# The compiler's names of instruction sets, by the values of MINITRI_KERNELS.
VARIANTS = {"": "native", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
SOURCE = Path(__file__).with_name("kernels.cpp")
CPUINFO = Path("/proc/cpuinfo")
IDENTITY = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
"""Prefixes of the lines of /proc/cpuinfo that identify a kind of processor."""


def load_library(source: Path) -> ctypes.CDLL:
    """Loads the library of a C++ file, and builds it first if necessary. Raises `OSError`."""
    with suppress(OSError, InputError):
        return ctypes.CDLL(str(built_library(source)))
    compiler = _compiler()
    log.info("building the CPU kernels (once, up to a minute)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder, "kernels.so")
        _compile(compiler, *FLAGS, str(source), "-o", str(built))
        library = ctypes.CDLL(str(built))
        try:
            place = built_library(source)
            unfinished = Path(shutil.copy(built, f"{place}.{os.getpid()}"))
            unfinished.replace(place)
        except (OSError, InputError) as error:
            log.info("cannot store the CPU kernels: %s", shorten(error, 90))
    return library


def has_kernels() -> bool:
    """Whether the CPU kernels are built, or a compiler could build them."""
    with suppress(OSError, InputError):
        return built_library(SOURCE).exists() or bool(_compiler())
    return False


def built_library(source: Path) -> Path:
    """Path of the library of a C++ file, in a folder that no other user can write to. Raises
    `OSError` or `InputError`."""
    folder = weights_folder() / "kernels"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"others can write to {folder}; delete it, or set MINITRI_WEIGHTS")
    return folder / f"{source.stem}-{identity(source)}.so"


def identity(source: Path = SOURCE) -> str:
    """Digest of sources, flags, processor: they decide bits. Raises `InputError`, `OSError`."""
    sources = (file.read_text("utf-8") for file in sorted(source.parent.glob("*.[ch]*")))
    depends_on = [*sources, os.environ.get("CXX", ""), *FLAGS, architecture(), *_instructions()]
    return hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:16]


def architecture() -> str:
    """The instruction set to compile for, by MINITRI_KERNELS. Raises `InputError`."""
    name = os.environ.get("MINITRI_KERNELS", "")
    if name not in VARIANTS:
        got = f"MINITRI_KERNELS is {shorten(name, 20)}"
        raise InputError(f"{got}; give avx2, avx512 or off, or unset it: all of this processor")
    return VARIANTS[name]


def _instructions() -> list[str]:
    """Kind and instructions of this processor, from /proc/cpuinfo, or by the compiler's macros."""
    with suppress(OSError):
        lines = {*CPUINFO.read_text("utf-8", "replace").splitlines()}
        if any(line.startswith(("flags", "Features")) for line in lines):
            return sorted(line for line in lines if line.startswith(IDENTITY))
    macros = _compile(_compiler(), "-E", "-dM", "-include", "cstdlib", os.devnull)
    return sorted(macros.splitlines())


def _compiler() -> list[str]:
    """Command of the compiler, which may have arguments (CXX='ccache g++'). Raises `OSError`."""
    compiler = os.environ.get("CXX", "").split() or [*filter(shutil.which, COMPILERS)][:1]
    if not compiler or os.name != "posix":
        raise OSError("none of c++, g++, clang++ is here; Debian: apt install g++")
    return compiler


def _compile(compiler: list[str], *arguments: str) -> str:
    """Runs the compiler for the wanted instructions and returns its output. Raises `OSError`."""
    wanted = architecture()
    for target in ([f"-march={wanted}"], [])[: 2 if wanted == "native" else 1]:
        command = [*compiler, *target, "-x", "c++", *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    message = shorten(done.stderr.decode(errors="replace"))
    raise OSError(f"{compiler[0]}: {message or done.returncode}")
