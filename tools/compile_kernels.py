"""Ahead-of-time compilation of every Triton kernel, for GPUs that need not be there.

    python -m tools.compile_kernels                 # all architectures, dtypes and tile sizes
    python -m tools.compile_kernels --arch 86 --kernel attention

Prints a line per case, with the numbers of `Usage`. A kernel that does not compile, spills, needs
more shared memory than the architecture has, or more instructions than a multiprocessor can issue
while the bytes come ends it with exit code 1. `ptxas` comes with Triton.
"""

import argparse
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
"""Shared memory that a program can have, by architecture (compute capability times 10)."""
TYPES = ("bf16", "fp16", "fp32")
ISSUED = {80: 10.6, 86: 21.0, 89: 45.0, 90: 6.9}
"""Instructions of a thread that a multiprocessor can issue, 128 a cycle, while memory brings it a
byte at 90 % of its bandwidth: A100, RTX 3090, RTX 4090, H200; on a B200 it would be 4.9."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Kernel with the types of its arguments and its compile-time constants."""

    name: str  # module in `devices/gpu/kernels`, and the sizes of this case
    kernel: Any
    types: dict[str, str]  # of all arguments that are not constants; int32 if not named
    constants: dict[str, Any]  # and in lower case options of the compiler
    is_pipelined: bool = False  # whether it must read ahead by asynchronous copies
    num_bytes: int = 0  # of weights that a warp reads in an iteration of the loop


def attention_cases(dtype: str) -> Iterator[Case]:
    """Cases of attention: one row, and several with and without a tree; the merge."""
    from minitri.devices.gpu.kernels.flash_decoding import (
        MAX_PIECES,
        attend_piece,
        merge_pieces,
        tile_sizes,
    )

    types = dict.fromkeys(("q", "keys", "values", "out"), f"*{dtype}")
    types |= {"lengths": "*i64", "block_mask": "*i1", "scale": "fp32"}
    types |= dict.fromkeys(("outs", "lses"), "*fp32")
    number_type = torch.float32 if dtype == "fp32" else torch.bfloat16
    for D, num_rows, has_mask in itertools.product((64, 80, 128), (1, 32, 64), (False, True)):
        constants = tile_sizes(num_rows, number_type, has_mask=has_mask)
        constants |= {"HEAD": D, "D": 64 if D == 64 else 128, "HAS_MASK": has_mask}
        name = f"attention, {num_rows} rows, D={D}{', tree' * has_mask}"
        yield Case(name, attend_piece, types, constants, is_pipelined=True)
    for D in (64, 128):
        constants = {"PIECES": MAX_PIECES, "D": D}
        yield Case(f"attention, merge D={D}", merge_pieces, types, constants)


def weights_cases(dtype: str) -> Iterator[Case]:
    """Cases of products of 3 and of 16 rows with a quantized matrix of a 7B model."""
    from minitri.core.roofline import GROUP
    from minitri.devices.gpu.kernels.weights import COLUMNS, multiply_tile, tile_sizes

    if dtype == "fp32":
        return  # rounded to bfloat16 before
    types = {"x": f"*{dtype}", "weight": "*i8", "scales": "*fp32", "out": f"*{dtype}"}
    forms = ((4, False), (4, True), (8, False))
    for (bits, is_narrow), M in itertools.product(forms, (3, 16)):
        constants = tile_sizes(M, bits, is_narrow=is_narrow)
        num_bytes = COLUMNS * GROUP * bits // 8
        name = f"weights, {bits} bits, {M} x {COLUMNS}{', narrow' * is_narrow}"
        # Numbers of float16 are converted from 4 bits one by one.
        counted = num_bytes if dtype == "bf16" or bits == 8 else 0
        yield Case(name, multiply_tile, types, constants, is_pipelined=True, num_bytes=counted)


KERNELS = {"attention": attention_cases, "weights": weights_cases}


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel."""

    registers: int  # of a thread
    spilled: int  # bytes that a thread spills from registers to memory
    shared: float  # KiB of shared memory of a program
    programs: int  # at once on a multiprocessor, by registers and shared memory
    asynchronous: int  # instructions that copy to shared memory while the program goes on
    per_byte: float  # instructions of a thread for each byte of weights; 0 where none are counted


def compiled(case: Case, arch: int) -> Usage:
    """Compiles a case for an architecture. Raises whatever the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in case.constants.items() if name.isupper()}
    options = {name: value for name, value in case.constants.items() if name not in constants}
    kinds = {
        name: "constexpr" if name in constants else case.types.get(name, "i32")
        for name in case.kernel.arg_names
    }
    varying = {param.name for param in case.kernel.params if param.do_not_specialize}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(kinds.items())
        if name not in varying and kind not in ("constexpr", "fp32")
    }
    source = ASTSource(case.kernel, kinds, constants, even)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run(
                [tool, how, file.name], capture_output=True, text=True, check=True
            ).stdout
            for how in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = (int(re.findall(rf"{key}:(\d+)", used)[0]) for key in ("REG", "STACK"))
    shared = made.metadata.shared / 1024
    # Each warp gets registers by 256 of 65,536, each program 1 KiB more of shared memory.
    by_registers = 256 // (-(-registers // 8) * options.get("num_warps", 4))
    programs = min(by_registers, int((SHARED_KIB[arch] + 1) / (shared + 1)))
    num_copies = len(re.findall(r"cp\.async\.c[ag]", made.asm["ptx"]))
    per_byte = 32 * loop_length(code) / case.num_bytes if case.num_bytes else 0.0
    return Usage(registers, stack, shared, programs, num_copies, per_byte)


def loop_length(code: str) -> int:
    """Number of instructions of the loop with the products in disassembled code."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code)
    lines = [(int(place, 16), text) for place, text in found]
    for end, text in lines:
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if jump and (start := int(jump[1], 16)) < end:
            body = [text for place, text in lines if start <= place <= end]
            if any("MMA" in text for text in body):
                return len(body)
    raise ValueError("the code has no loop with products")


def problem_of(case: Case, usage: Usage, arch: int) -> str:
    """The problem with a compiled kernel, or an empty text."""
    if usage.spilled:
        return "spills"
    if usage.shared > SHARED_KIB[arch]:
        return "too much shared memory"
    if usage.per_byte > ISSUED.get(arch, math.inf):
        return "too many instructions"
    return "no asynchronous copies" if case.is_pipelined and not usage.asynchronous else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--arch", type=int, action="append", choices=[*SHARED_KIB], help="one of these only")
    add("--kernel", action="append", choices=[*KERNELS], help="those of one module only")
    args = parser.parse_args()
    columns = "".join(f"{field.name:>13s}" for field in dataclasses.fields(Usage))
    print(f"arch dtype {'kernel':32s}{columns}")
    num_wrong = 0
    chosen = (args.arch or SHARED_KIB, args.kernel or KERNELS, TYPES)
    for arch, kernel, dtype in itertools.product(*chosen):
        for case in KERNELS[kernel](dtype):
            usage = compiled(case, arch)
            problem = problem_of(case, usage, arch)
            num_wrong += bool(problem)
            numbers = "".join(f"{number:13.4g}" for number in dataclasses.astuple(usage))
            print(f"{arch:4d} {dtype:5s} {case.name:32s}{numbers}  {problem}", flush=True)
    return int(num_wrong > 0)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
