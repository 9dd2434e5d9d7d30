"""The kernels under sanitizers: no read or write elsewhere, no race between threads."""

import subprocess
from pathlib import Path

import pytest

from minitri.devices.cpu.build import SOURCE
from minitri.devices.cpu.kernels import load_kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here"),
]


def run(folder: Path, sanitizer: str, program: Path) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++17", "-O1", "-march=native", "-pthread", "-w"]
    built = folder / "program"
    headers = ["-I", SOURCE.parent]
    command = ["c++", *flags, f"-fsanitize={sanitizer}", *headers, program, "-o", built]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        done = subprocess.run([built], capture_output=True, text=True, timeout=600)
    return done


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    if (done := run(tmp_path, sanitizer, empty)).returncode:
        pytest.skip(f"this compiler has no sanitizer of {sanitizer}: {done.stderr[-99:]!r}")
    done = run(tmp_path, sanitizer, Path(__file__).with_name("sanitized.cpp"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "same\n", "")
