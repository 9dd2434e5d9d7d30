"""The rooms of the package: who may import whom, how long a file may be, which words are gone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minitri"
MAY_IMPORT = {
    "errors": "",
    "folders": "errors",
    "settings": "errors",
    "config": "errors",
    "stats": "",
    "events": "stats",
    "requests": "settings stats loading",
    "execution": "",
    "model": "errors config execution settings",
    "parallel": "errors config execution model",
    "decoding": "errors settings stats",
    "drafters": "errors settings stats decoding",
    "trees": "settings stats decoding model runner",
    "roofline": "config model",
    "ledger": "config execution settings decoding parallel roofline",
    "caches": "errors config settings stats model decoding",
    "cpu": "settings errors execution folders model caches",
    "gpu": "errors config execution settings stats model decoding caches roofline parallel",
    "runner": "errors settings model decoding caches gpu",
    "memory": "errors settings model drafters caches gpu runner",
    "stack": "settings stats model decoding drafters trees caches roofline gpu runner memory "
    "requests",
    "pool": "errors settings caches gpu memory",
    "loading": "errors config execution folders settings model caches cpu gpu parallel",
    "generation": "errors events settings stats model decoding gpu requests memory stack pool",
    "engine": "errors config events settings model drafters gpu loading requests memory pool "
    "generation",
}
"""By room or file, the others that it may import. Programs, cli and benchmarks may import all."""
CORE = (
    "decoding", "model", "caches", "memory", "stack", "generation", "engine", "settings",
)  # fmt: skip
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


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


def ours(file: Path) -> set[str]:
    names = (name for name in imported(file) if name.startswith("minitri."))
    return {name.removeprefix("minitri.") for name in names}


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_room_imports_only_what_it_may(file):
    room = module_name(file).split(".")[0]
    if room not in MAY_IMPORT:
        programs = {"generate", "chat", "serve", "bench", "plan", "selftest", "__main__"}
        assert room in {"cli", "benchmarks", *programs}
        return
    others = {name.split(".")[0] for name in ours(file)} - {room}
    assert others <= set(MAY_IMPORT[room].split())


def test_imports_make_no_circle():
    """Imports inside functions count."""
    graph = {module_name(file): ours(file) for file in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(FILES)


def test_the_algorithm_and_the_caches_know_nothing_of_networks_and_files():
    for file in FILES:
        name = module_name(file)
        if name.startswith("decoding"):
            assert not any(other.startswith(("model", "caches", "gpu")) for other in ours(file)), (
                name
            )
        if name.startswith("caches"):
            assert "model.llama" not in ours(file), name


def test_the_core_is_short_enough_to_read():
    reused = ("caches.prefixes", "caches.snapshots")  # between runs, no part of one
    files = [file for file in FILES if module_name(file).split(".")[0] in CORE]
    files = [file for file in files if module_name(file) not in reused]
    assert sum(num_lines(file) for file in files) <= 3900
    assert sum(num_lines(file) for file in FILES) <= 18000


def num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_no_file_and_no_function_is_too_long_to_read(file):
    assert num_lines(file) <= 320
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def test_no_folder_has_more_files_than_one_sees_at_once():
    """At the top stand the programs, too."""
    for folder in {file.parent for file in FILES}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= (20 if folder == PACKAGE else 12)


def test_words_that_the_field_does_not_use_are_gone():
    words = ("la" + "w", "la" + "ws", "co" + "ins", "sh" + "elf", "ju" + "dge")
    gone = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    files = [ROOT / "README.md", ROOT / "tools/RESULTS.md", *FILES]
    files += [file for name in ("tests", "tools") for file in (ROOT / name).rglob("*.py")]
    assert {str(file) for file in files if gone.search(file.read_text(encoding="utf-8"))} == set()


def test_transformers_is_never_imported(folder):
    program = (
        "import sys, minitri, minitri.bench.__main__, minitri.generate\n"
        f"run = minitri.load({str(folder)!r}).generate('She had')\n"
        "next(run), next(run)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    names = {name.split(".")[0] for file in FILES for name in imported(file)}
    assert names.isdisjoint({"transformers", "tools", "tests"})
