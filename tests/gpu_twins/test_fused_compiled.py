"""The fused kernels and the one that filters, compiled ahead of time for real architectures, with
no GPU.

    python -m tests.gpu_twins.test_fused_compiled 80 86 89 90 100     # prints what each takes
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

ARCHITECTURES = (86, 100)


def cases(dtype: str):
    """Name, kernel, types of arguments that are not int32, constants, warps: shapes of 7B and
    more, heads that fill no tile."""
    from minitri.gpu.kernels import fused, sampling

    rows = dict.fromkeys(
        (
            "qkv", "q", "keys", "values", "raw_keys", "queries", "x", "change", "weight", "total",
            "normed", "gate_up", "out",
        ),
        f"*{dtype}",
    )  # fmt: skip
    types = {**rows, "cos": "*fp32", "signed_sin": "*fp32", "slots": "*i64", "eps": "fp32"}
    keeps = {"KEEPS_RAW": True, "KEEPS_QUERIES": True, "HEADS": fused.HEADS_PER_PROGRAM}
    for H, K, D, size in ((32, 32, 128, 128), (9, 3, 64, 64), (32, 8, 80, 128)):
        constants = {"H": H, "K": K, "D": D, "SIZE": size, **keeps}
        yield f"rotate {H} {K} {D}", fused.rotate_and_write, types, constants, 4
    for size in (1024, 4096, 8192):
        yield f"norm {size}", fused.add_and_normalize, types, {"SIZE": size}, 8
    yield "gate", fused.gate, types, {"SIZE": fused.GATES_PER_PROGRAM}, 4
    types = {"logits": "*fp32", "probs": "*fp32", "numbers": "*fp64"}
    constants = {"UNIT": 2.0**45, "BLOCK": sampling.BLOCK}
    for name, is_on in (("all filters", True), ("no filter", False)):
        forms = dict.fromkeys(("HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P"), is_on)
        yield name, sampling.filter_row, types, {**constants, **forms}, sampling.NUM_WARPS


def compiled(arch: int, kernel, types, constants, num_warps: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, varying = kernel.arg_names, {p.name for p in kernel.params if p.do_not_specialize}
    kinds = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in varying and kinds[name] not in ("constexpr", "fp32")
    }
    source = ASTSource(kernel, kinds, constants, even)
    options = {"num_warps": num_warps}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(re.search(rf"{key}:(\d+)", used)[1]) for key in ("REG", "STACK", "LOCAL")}
    wide = len(re.findall(r"(?:ld|st)\.global\S*\.v[248]", made.asm["ptx"]))
    return {**found, "shared": made.metadata.shared, "threads": 32 * num_warps, "wide": wide}


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        for dtype in ("bf16", "fp32"):
            for name, *case in cases(dtype):
                print(json.dumps({"case": f"sm_{arch} {dtype} {name}", **compiled(arch, *case)}))


if __name__ == "__main__":
    main()


def test_every_kernel_fits_and_spills_nothing_and_reads_several_numbers_at_once():
    """In a process of its own: here Triton is its interpreter."""
    env = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, *map(str, ARCHITECTURES)],
        env=env, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 18 * len(ARCHITECTURES)
    for each in made:
        assert each["STACK"] == each["LOCAL"] == 0, each
        assert each["REG"] * each["threads"] <= 65_536, each
        assert each["shared"] <= 8192, each
        assert each["wide"] > 0, each
