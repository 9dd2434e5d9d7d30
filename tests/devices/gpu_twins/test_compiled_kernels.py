"""Every Triton kernel compiles for real architectures, with no GPU: it fits and spills nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

TOOL = Path(__file__).parents[3] / "tools/compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["86", "90", "100"])
def test_one_case_of_every_kernel_and_dtype_compiles(arch):
    """In a process of its own: here Triton is its interpreter. Warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", TOOL, "--arch", arch, "--first", "1"],
        env={name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("attention", "weights"):
        assert f" {kernel}," in done.stdout
