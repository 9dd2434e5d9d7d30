"""Every Triton kernel compiles for real architectures, with no GPU: it fits and spills nothing."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

TOOL = Path(__file__).parents[2] / "tools/compile_kernels.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compile_kernels", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_kernels"] = module  # where its dataclasses look their types up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100"])
def test_one_case_of_every_kernel_and_dtype_compiles(arch, tool):
    """In a process of its own: here Triton is its interpreter. Warnings are errors."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", TOOL, "--arch", arch, "--first", "1"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in tool.KERNELS:
        assert f" {kernel}," in done.stdout


def test_what_spills_or_does_not_fit_or_does_not_read_ahead_is_wrong(tool):
    case = next(tool.attention_cases("bf16"))
    fine = tool.Usage(registers=96, spilled=0, shared=99, asynchronous=8)
    assert tool.problem_of(case, fine, 86) == ""
    assert tool.problem_of(case, replace(fine, spilled=8), 86) == "spills"
    assert tool.problem_of(case, replace(fine, shared=99.1), 86) == "too much shared memory"
    assert tool.problem_of(case, replace(fine, shared=99.1), 80) == ""
    assert tool.problem_of(case, replace(fine, asynchronous=0), 86) == "no asynchronous copies"
    assert (
        tool.problem_of(replace(case, is_pipelined=False), replace(fine, asynchronous=0), 86) == ""
    )
