"""The structure of the package: rooms in an order, what each may import, how long it may be."""

import ast
import functools
import importlib
import multiprocessing
import sys
import tokenize
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path

import minitri

ROOT = Path(__file__).parent.parent
ROOMS = {
    "core": (5_780, {"core"}),
    "devices": (2_290, {"core", "devices"}),
    "text": (855, {"core", "text"}),
    "files": (1_770, {"core", "devices", "text", "files"}),
    "trees": (330, {"core", "trees"}),
    "": (750, {"core", "devices", "text", "files", "trees", ""}),
    "apps": (3_745, {"core", "devices", "text", "files", "trees", "", "apps"}),
}
"""Of each folder of the package, "" being its top: the most lines, and the rooms it may import."""
ENTRIES = {"generate.py", "__main__.py"}
"""Start programs, so they alone import `apps` from above."""
FOREIGN = ("tokenizers", "sentencepiece", "safetensors", "jinja2", "huggingface_hub", "numpy")
FILES = sorted((ROOT / "minitri").rglob("*.py"))


def room_of(name: str) -> str:
    """The room of a module such as minitri.core.model.llama: core."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


CORE = [file for file in FILES if room_of(module_name(file)) == "core"]


parsed = functools.cache(lambda file: [*ast.walk(ast.parse(file.read_bytes()))])


def nodes_of(file: Path, kind: type[ast.AST]) -> list:
    return [node for node in parsed(file) if isinstance(node, kind)]


def imported(file: Path) -> set[str]:
    """The modules that a file imports, at its top or inside functions."""
    names = {alias.name for node in nodes_of(file, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes_of(file, ast.ImportFrom)}


def roots(files: list[Path]) -> set[str]:
    return {name.split(".")[0] for file in files for name in imported(file)}


def num_lines(file: Path) -> int:
    return len(file.read_text("utf-8").splitlines())


def num_tokens(file: Path) -> int:
    """Tokens of Python without comments, docstrings and layout."""
    layout = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"}
    with file.open("rb") as source:
        kinds = [tokenize.tok_name[token.type] for token in tokenize.tokenize(source.readline)]
    docstrings = [it for it in nodes_of(file, ast.Expr) if isinstance(it.value, ast.Constant)]
    return sum(kind not in layout for kind in kinds) - len(docstrings)


def test_a_room_imports_only_the_rooms_above_it():
    for file in FILES:
        own = room_of(module_name(file))
        names = {name for name in imported(file) if name.split(".")[0] == "minitri"}
        allowed = ROOMS[own][1] | ({"apps"} if own == "" and file.name in ENTRIES else set())
        assert {room_of(name) for name in names} <= allowed, file


def test_imports_make_no_circle():
    """Imports inside functions count."""
    graph = {module_name(file): imported(file) for file in FILES if file.name != "__init__.py"}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_the_core_needs_torch_and_nothing_else():
    assert roots(CORE) <= {"minitri", "torch", *sys.stdlib_module_names}
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        process.submit(import_core_alone).result()


def import_core_alone() -> None:
    for name in [name for name in sys.modules if name.startswith("minitri")]:
        del sys.modules[name]
    loaded = [name for name in sys.modules if name.split(".")[0] in FOREIGN]
    sys.modules |= dict.fromkeys([*FOREIGN, *loaded])
    importlib.import_module("minitri.core.generation")


def test_tests_of_the_core_import_the_core_alone():
    for file in (ROOT / "tests/core").rglob("*.py"):
        names = {name for name in imported(file) if name.split(".")[0] in ("minitri", "tests")}
        assert all(name.startswith(("minitri.core", "tests.core")) for name in names), file


def test_all_of_it_is_short_enough_to_read():
    """Budgets only fall."""
    lines = Counter[str]()
    for file in FILES:
        lines[room_of(module_name(file))] += num_lines(file)
        assert num_lines(file) <= 320, file
        for node in nodes_of(file, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
    assert {room: num for room, num in lines.items() if num > ROOMS[room][0]} == {}
    assert lines.total() <= 15_500
    assert sum(map(num_tokens, FILES)) <= 110_000
    assert sum(map(num_lines, (ROOT / "minitri").rglob("cpu/*.[ch]*"))) <= 2_000
    assert sum(map(num_lines, (ROOT / "tools").rglob("*.py"))) <= 6_950
    assert sum(map(num_lines, (ROOT / "tests").rglob("*.py"))) <= 14_500
    assert (ROOT / "README.md").stat().st_size <= 9 * 1024


def test_names_and_folders_are_found_at_a_glance():
    """One name for one module, and in the core one definition for one name."""
    files = [file for file in FILES if not file.stem.startswith("__")]
    names = Counter(file.name for file in files)
    folders = Counter(file.parent.name for file in files)
    assert max(count for folder, count in folders.items() if folder != "core") <= 12
    assert folders["core"] <= 16
    for file in CORE:
        kinds = (ast.FunctionDef, ast.ClassDef)
        body = ast.parse(file.read_bytes()).body
        names.update(node.name for node in body if isinstance(node, kinds))
    assert [name for name, count in names.items() if count > 1] == []


def test_transformers_is_never_imported(folder, monkeypatch):
    """Packages that are imported do not import it either."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    minitri.load(str(folder), device="cpu").complete("She had", max_new_tokens=2)
    assert roots(FILES).isdisjoint({"transformers", "tools", "tests"})
