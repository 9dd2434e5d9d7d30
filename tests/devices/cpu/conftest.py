"""Kernels compiled for this processor's instructions and for others."""

import ctypes
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from minitri.devices.cpu.kernels import SOURCE, Kernels, load_kernels

INSTRUCTIONS = ["native"]
if platform.machine() == "x86_64":
    INSTRUCTIONS += ["x86-64-v3", "x86-64"]  # AVX2; SSE2, like any other 16-byte vectors


def compiled(folder: Path, instructions: str = "native", change: Sequence[str] = ("\n", "\n")):
    """Kernels on two threads; a text of their source may be changed."""
    texts = {file.name: file.read_text() for file in SOURCE.parent.glob("*.[ch]*")}
    assert any(change[0] in text for text in texts.values())
    for name, text in texts.items():
        (folder / name).write_text(text.replace(*change))
    flags = ["-std=c++17", "-O1", f"-march={instructions}", "-shared", "-fPIC", "-pthread", "-w"]
    library = folder / "kernels.so"
    subprocess.run(["c++", *flags, str(folder / SOURCE.name), "-o", str(library)], check=True)
    return Kernels(ctypes.CDLL(str(library)), num_threads=2)


@pytest.fixture(scope="session", params=INSTRUCTIONS)
def kernels(request, tmp_path_factory):
    if load_kernels() is None:
        pytest.skip("there is no C++ compiler here")
    return compiled(tmp_path_factory.mktemp("kernels"), request.param)
