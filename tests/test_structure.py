"""Imports point one way, and `transformers` is never among them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minitri"
LAYERS = [
    {"errors"},
    {"config", "settings", "exits"},
    {"rope", "linear", "graphs", "stopping", "shapes"},
    {"stats"},
    {"attention", "caches.base", "caches.streams"},
    {"attention_triton"},
    {"attention_cuda"},
    {"caches.full", "caches.streaming"},
    {"caches.policies", "caches.offloaded"},
    {"caches.retrieval"},
    {"caches"},
    {"model", "sampling"},
    {"reader", "verification"},
    {"coins", "bandwidth"},
    {"cascade"},
    {"gguf_file"},
    {"checkpoint"},
    {"fetch", "tokenizer"},
    {"drafters.model", "drafters.ngram"},
    {"drafters"},
    {"tuning"},
    {"placement"},
    {"readers"},
    {"assembly"},
    {"generation"},
    {"engine"},
    {"flags", "report", "compare", "peers"},
    {"generate", "dummy"},
    {"bench", "selftest", "plan"},
]
"""From the bottom up; a module imports only from layers below its own."""


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> set[str]:
    """Everything a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def test_every_module_has_its_layer():
    assert {module_name(file) for file in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_downwards(file):
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    ours = {name.removeprefix("minitri.") for name in imported(file) if name.startswith("minitri.")}
    assert all(level[name] < level[module_name(file)] for name in ours), ours


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_no_file_is_too_long_to_read(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 350


def test_transformers_is_never_imported(folder):
    program = (
        "import sys, minitri, minitri.bench, minitri.generate, minitri.selftest\n"
        f"list(minitri.load({str(folder)!r}).generate('She had', generation=minitri.GenerationConfig(4)))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    others = [file for file in FILES if file.name != "peers.py"]  # which measures it, when it is asked to
    assert not any(name.split(".")[0] == "transformers" for file in others for name in imported(file))
