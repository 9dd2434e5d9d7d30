"""The kernel for weights of 8 bits, compiled ahead of time for real architectures, with no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

CASES = {
    (80, "i8", "bf16", 1, 4096): 163,
    (86, "i8", "fp16", 64, 12288): 99,
    (89, "fp8e4nv", "bf16", 20, 4096): 99,
    (90, "fp8e4nv", "fp16", 1, 4096): 227,
    (100, "i8", "bf16", 5, 12288): 227,
    (86, "fp8e4nv", "bf16", 1, 4096): 0,
}
"""Architecture, weights, rows, M, N: KiB of shared memory there, or 0 where it is refused."""

PROGRAM = """
import json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minitri.gpu.kernels.weights import SHARES, multiply_tile, tile_sizes

tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

def compiled(arch, form, rows, M, N):
    constants = {**tile_sizes(M, N, num_processors=132), "SHARES": SHARES}
    kinds = {"x": f"*{rows}", "weight": f"*{form}", "scales": "*fp32", "out": f"*{rows}"}
    names = multiply_tile.arg_names
    kinds = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
    others = {"M", *constants}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in others}
    source, target = ASTSource(multiply_tile, kinds, constants, even), GPUTarget("cuda", arch, 32)
    try:
        made = triton.compile(source, target=target, options={"num_warps": SHARES})
    except Exception as error:
        return {"error": str(error)}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "shared": made.metadata.shared, "stack": int(re.search(r"STACK:(\\d+)", used)[1]),
        "registers": int(re.search(r"REG:(\\d+)", used)[1]),
        "asynchronous": len(re.findall("cp.async.cg", made.asm["ptx"])),
    }

print(json.dumps([compiled(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def compiled() -> dict:
    """In a process of its own: here Triton is its interpreter."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps([*CASES])],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_fits_spills_nothing_and_reads_ahead(compiled, case):
    made = compiled[case]
    if not CASES[case]:
        assert "fp8e4nv not supported in this architecture" in made["error"]
        return
    assert made["shared"] <= 80 * 1024 < CASES[case] * 1024
    assert made["stack"] == 0
    assert made["registers"] <= 168
    assert made["asynchronous"] > 0
