"""A wheel runs without a compiler: it is built, installed next to PyTorch, and generates text."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from minitri.devices.cpu.build import CPUINFO, LEVELS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="needs the compiler of the wheel ziglang")
def test_an_installed_wheel_computes_by_its_kernels_without_a_compiler(tmp_path, real_weights):
    """The wheel has the library of this machine's level alone. `--bitwise` refuses to run without
    kernels, and the drafter comes with the wheel."""
    words = CPUINFO.read_text().split() if CPUINFO.exists() else []
    level = next((name for name, needed in LEVELS.items() if {*needed.split()} <= {*words}), None)
    if level is None:
        pytest.skip("no wheel is made for this processor")
    build = ["tools.build_wheels", "--level", level, "--out", tmp_path]
    subprocess.run([sys.executable, "-m", *build], cwd=ROOT, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert re.fullmatch(r"minitri-[\d.]+-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)
    site, home = tmp_path / "site", tmp_path / "home"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", *install], check=True)
    [library] = site.rglob("*.so")
    assert b"libstdc++" not in library.read_bytes()  # which may be too old there
    places = {"PYTHONPATH": str(site), "PATH": str(home), "HOME": str(home)}
    environment = {key: value for key, value in os.environ.items() if "MINITRI" not in key}
    environment = {**environment, **places, "XDG_CACHE_HOME": str(home), "CXX": ""}
    flags = ["--model", real_weights, "--draft", "smollm2-135m-draft", "--method", "triforce"]
    command = [sys.executable, "-m", "minitri", "The sea was", "-n", "8", "--bitwise", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, "building" in done.stderr) == (0, False), done.stderr
    assert len(done.stdout) > 10
    assert not (home / "minitri").exists()
