"""Builds wheels with compiled CPU kernels: where they are installed no compiler is needed.

    pip install ziglang "setuptools>=70.1" && python -m tools.build_wheels   # two wheels in dist/

The wheel for x86-64 has a library for each level of instructions, from which `build.py` chooses
when it loads one; that for aarch64 has one. The compiler of the package ziglang makes all of them
on any machine, for an old glibc, with the C++ library inside. They know neither Python nor PyTorch,
so a wheel serves every version of these. The drafter of weights/ comes along.
"""

import argparse
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from minitri.devices.cpu.build import FLAGS, LEVELS, SOURCE, wheel_name

ROOT = Path(__file__).parent.parent
GLIBC = "2.17"  # oldest version that the libraries run with
MACHINES = {"x86_64": ("amx", "bf16", "avx512", "avx2"), "aarch64": ("neon",)}
FEATURES = {"bmi1": "bmi", "abm": "lzcnt", "asimd": "neon", "amx_bf16": "amx-bf16"}
FEATURES |= {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni"}
"""The compiler's names of instructions to which /proc/cpuinfo gives others."""
DRAFTER = "smollm2-135m-draft"


def compile_library(folder: Path, machine: str, level: str) -> None:
    """Compiles the kernels for a level into a folder. Raises `CalledProcessError`."""
    name = wheel_name(level, f"zig{version('ziglang')}")
    target = ["-target", f"{machine}-linux-gnu.{GLIBC}"]
    features = [FEATURES.get(word, word) for word in LEVELS[level].split()]
    if "avx512vnni" in features:  # else LLVM takes two others for it: prompts are 25 % slower
        features.append("fast-dpwssd")
    for feature in features:  # of the kernels alone: the C++ library is built once
        target += ["-Xclang", "-target-feature", "-Xclang", f"+{feature}"]
    # Without symbols of the C++ library, which would meet PyTorch's.
    only_ours = ["-s", f"-Wl,--version-script={folder / 'exports'}"]
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, *target, *only_ours]
    subprocess.run([*command, SOURCE, "-o", folder / name], check=True)


def make_wheel(machine: str, levels: list[str], out: Path) -> None:
    """Writes the wheel of a machine into a folder, from a copy of the sources."""
    with TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        unwanted = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "minitri", Path(copy, "minitri"), ignore=unwanted)
        shutil.copytree(ROOT / "weights" / DRAFTER, Path(copy, "minitri", "weights", DRAFTER))
        place = Path(copy, SOURCE.relative_to(ROOT)).parent
        Path(place, "exports").write_text("{ global: minitri_*; local: *; };")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda level: compile_library(place, machine, level), levels))
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        settings = f"--config-settings=--build-option=--plat-name={platform}"
        flags = ["--quiet", "--no-deps", "--no-build-isolation", settings, "--wheel-dir", str(out)]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, copy], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this; repeatable")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="FOLDER")
    args = parser.parse_args()
    if not find_spec("ziglang"):
        raise SystemExit('there is no compiler; pip install ziglang "setuptools>=70.1"')
    out = args.out.resolve()
    for machine, known in MACHINES.items():
        if levels := [level for level in known if level in (args.level or known)]:
            make_wheel(machine, levels, out)
    for wheel in sorted(out.glob("*.whl")):
        print(wheel, wheel.stat().st_size)


if __name__ == "__main__":
    main()
