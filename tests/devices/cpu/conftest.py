"""Compiled kernels, once per session: for this processor's instructions and for fewer."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest

from minitri.devices.cpu.build import SOURCE
from minitri.devices.cpu.kernels import Kernels, load_kernels

BUILT = load_kernels()
OTHERS = ["x86-64"] if platform.machine() == "x86_64" else []
"""Instruction sets that this processor has, too: SSE2, like any other 16-byte vectors."""
if OTHERS and BUILT is not None and BUILT.instructions != "AVX2":
    OTHERS += ["x86-64-v3", "x86-64-v4"]


def compiled(
    folder: Path, *changes: tuple[str, str], instructions: str = "native", level: int = 0
) -> Kernels:
    """Kernels on two threads; texts of their source are replaced."""
    texts = {file.name: file.read_text() for file in SOURCE.parent.glob("*.[ch]*")}
    for old, new in changes:
        assert any(old in text for text in texts.values())
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    flags = ["-std=c++17", "-shared", "-fPIC", "-pthread", "-w"]
    flags += [f"-O{level}", f"-march={instructions}"]
    library = folder / "kernels.so"
    subprocess.run(["c++", *flags, str(folder / SOURCE.name), "-o", str(library)], check=True)
    return Kernels(ctypes.CDLL(str(library)), num_threads=2)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


@pytest.fixture(scope="session", params=["native", *SLOW])
def kernels(request, tmp_path_factory):
    """Kernels on two threads; those of this processor are the built ones."""
    if BUILT is None:
        pytest.skip("there is no C++ compiler here")
    if request.param == "native":
        return Kernels(BUILT.library, num_threads=2)
    folder = tmp_path_factory.mktemp("kernels")
    return compiled(folder, instructions=request.param, level=1)
