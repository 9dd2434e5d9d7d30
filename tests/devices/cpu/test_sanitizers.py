"""The kernels under sanitizers: no read or write elsewhere, no race between threads."""

import subprocess
from pathlib import Path

import pytest

from minitri.devices.cpu.kernels import SOURCE, load_kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here"),
]
PROGRAM = Path(__file__).with_name("sanitized.cpp")
WRONG = {
    "address": ("if (s >= n) {", "if (s > n) {"),  # one row of values too many
    "thread": (
        "fetch_add(1, std::memory_order_acq_rel)",
        "fetch_add(1, std::memory_order_relaxed)",
    ),
}


def run(folder: Path, sanitizer: str, program: Path) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++17", "-O1", "-g", "-march=native", "-pthread", "-w"]
    built = folder / "program"
    command = ["c++", *flags, f"-fsanitize={sanitizer}", "-I", folder, program, "-o", built]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        done = subprocess.run([built], capture_output=True, text=True, timeout=600)
    return done


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing_but_what_is_wrong(sanitizer, is_wrong, tmp_path):
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    if (done := run(tmp_path, sanitizer, empty)).returncode:
        pytest.skip(f"this compiler has no sanitizer of {sanitizer}: {done.stderr[-99:]!r}")
    for file in SOURCE.parent.glob("*.[ch]*"):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace(*WRONG[sanitizer]) if is_wrong else text)
    done = run(tmp_path, sanitizer, PROGRAM)
    if is_wrong:
        assert "Sanitizer: " in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "same\n", "")
