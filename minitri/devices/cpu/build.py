"""Finds the CPU kernels in the wheel, or compiles them for this processor when first needed.

A wheel has a library for each of LEVELS; the best that the processor can run is used, unless CXX
names a compiler. A library's name has a digest of the sources and flags, and, if it was built here,
of $CXX, instructions and processor, so that none of another machine or version is used.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.devices.folders import weights_folder

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-w")
# The compiler's names of instruction sets, by the values of MINITRI_KERNELS.
VARIANTS = {"": "native", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
V3 = "avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{V4} avx512_bf16 avx512_vnni"
LEVELS = {"amx": f"{BF16} amx_bf16", "bf16": BF16, "avx512": V4, "avx2": V3, "neon": "asimd"}
"""Libraries of a wheel, best first, with words in /proc/cpuinfo of processors that can run them."""
SOURCE = Path(__file__).with_name("kernels.cpp")
CPUINFO = Path("/proc/cpuinfo")
IDENTITY = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
"""Prefixes of the lines of /proc/cpuinfo that identify a kind of processor."""


def load_library() -> ctypes.CDLL:
    """Loads the compiled CPU kernels; builds them if none fit. Raises `OSError`, `InputError`."""
    for found in candidates():
        with suppress(OSError):
            return ctypes.CDLL(str(found))
    compiler = _compiler()
    log.info("building the CPU kernels (once, up to a minute)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = Path(folder, _built_name())
        _compile(compiler, *FLAGS, str(SOURCE), "-o", str(built))
        library = ctypes.CDLL(str(built))
        try:
            place = built_library()
            with tempfile.TemporaryDirectory(dir=place.parent) as near:
                Path(shutil.copy(built, near)).replace(place)
        except (OSError, InputError) as error:
            log.info("cannot store the CPU kernels (%s); set MINITRI_WEIGHTS", shorten(error, 90))
    return library


def has_kernels() -> bool:
    """Whether compiled CPU kernels are found, or a compiler that could build them."""
    with suppress(OSError):
        return any(candidates()) or bool(_compiler())
    return False


def let_threads_sleep() -> None:
    """Makes PyTorch's idle threads sleep, not spin, if there are kernels; call before importing it.
    Spinning threads take cores from the kernels: to read a prompt then takes 1.5 times as long."""
    if os.environ.get("MINITRI_KERNELS") != "off" and has_kernels():
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def candidates() -> Iterator[Path]:
    """Paths of kernel libraries for this processor, best first: a wheel's, then one built here."""
    wanted = os.environ.get("MINITRI_KERNELS", "")
    if CPUINFO.exists() and not os.environ.get("CXX"):
        found = {file.name.split("-")[1]: file for file in SOURCE.parent.glob(wheel_name())}
        words = {*CPUINFO.read_text("utf-8", "replace").split()}
        for level, needed in LEVELS.items():
            if level in found and wanted in ("", level) and words.issuperset(needed.split()):
                yield found[level]
    with suppress(OSError, InputError):
        yield from filter(Path.exists, [built_library()])


def wheel_name(level: str = "*", compiler: str = "*") -> str:
    """File name of a wheel's library: `level` is a key of LEVELS, `compiler` a name with a version.
    By default a pattern that matches all such names."""
    return f"{SOURCE.stem}-{level}-{_digest()}-{compiler}.so"


def built_library() -> Path:
    """Path for the library compiled on this machine; makes its folder.
    Raises `OSError` if other users can write to the folder, or `InputError`."""
    folder = weights_folder() / "kernels"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_mode & 0o022 or status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"others can write to {folder}; delete it, or set MINITRI_WEIGHTS")
    return folder / _built_name()


def identity(library: ctypes.CDLL) -> str:
    """Digest of library and processor, on which last bits of results depend. Raises `OSError`."""
    return _digest(Path(library._name).name, *_instructions())


def _built_name() -> str:
    depends_on = (os.environ.get("CXX", ""), architecture(), *_instructions())
    return f"{SOURCE.stem}-{_digest(*depends_on)}.so"


def _digest(*others: str) -> str:
    """Digest of SOURCE, its headers, flags and the texts `others`: 16 hexadecimal digits."""
    sources = (file.read_text("utf-8") for file in sorted(SOURCE.parent.glob("*.[ch]*")))
    return hashlib.sha256("\0".join([*sources, *FLAGS, *others]).encode()).hexdigest()[:16]


def architecture() -> str:
    """The compiler's -march for $MINITRI_KERNELS, such as x86-64-v3. Raises `InputError`."""
    name = os.environ.get("MINITRI_KERNELS", "")
    if name not in VARIANTS:
        raise InputError(f"MINITRI_KERNELS is {shorten(name)}; give avx2, avx512, off or unset it")
    return VARIANTS[name]


def _instructions() -> list[str]:
    """Lines that identify this processor: of /proc/cpuinfo, or the compiler's macros for it."""
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
    """Output of a compiler with `arguments` and -march. Raises `OSError`, `InputError`."""
    wanted = architecture()
    for target in ([f"-march={wanted}"], [])[: 2 if wanted == "native" else 1]:
        command = [*compiler, *target, "-x", "c++", *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            return done.stdout.decode(errors="replace")
    message = shorten(done.stderr.decode(errors="replace"))
    raise OSError(f"{compiler[0]}: {message or done.returncode}")
