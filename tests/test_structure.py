"""The rooms of the package: who may import whom, how long a file may be."""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minitri"
MAY_IMPORT = {
    "errors": "",
    "log": "",
    "folders": "errors",
    "fields": "errors",
    "grammar": "errors fields",
    "settings": "errors fields grammar",
    "config": "errors fields",
    "stats": "fields",
    "requests": "errors fields settings stats loading",
    "model": "errors config settings",
    "parallel": "errors config model",
    "filters": "errors config grammar settings stats decoding loading",
    "decoding": "errors settings stats filters",
    "drafters": "errors settings stats filters decoding",
    "trees": "settings stats decoding model runner",
    "roofline": "config model",
    "caches": "errors log config settings stats model decoding",
    "cpu": "settings errors folders log model caches",
    "gpu": "errors log config settings stats model decoding caches roofline",
    "prefill": "model decoding caches gpu",
    "runner": "errors settings filters model decoding caches gpu",
    "memory": "errors settings model drafters caches gpu runner prefill",
    "stack": "settings stats filters model decoding drafters trees caches roofline gpu runner "
    "prefill memory requests",
    "loading": "errors log config fields folders settings model caches cpu gpu parallel",
    "generation": "errors fields settings stats filters model decoding gpu loading requests "
    "memory stack",
    "worker": "errors log settings requests generation",
    "engine": "errors settings model drafters gpu loading requests prefill memory generation "
    "worker",
    "loader": "errors config drafters loading parallel engine",
}
"""By room or file, the others that it may import. Programs and cli may import all."""
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
        programs = {"generate", "chat", "serve", "bench", "plan", "selftest", "audit", "__main__"}
        assert room in {"cli", "cluster", *programs}
        return
    others = {name.split(".")[0] for name in ours(file)} - {room}
    assert others <= set(MAY_IMPORT[room].split())
    assert room != "caches" or "model.llama" not in ours(file)


def test_imports_make_no_circle():
    """Imports inside functions count."""
    graph = {module_name(file): ours(file) for file in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(FILES)


def test_the_code_is_short_enough_to_read():
    """Limits only fall. Tokens are those of Python without comments, docstrings and layout."""
    texts = [file.read_text(encoding="utf-8") for file in FILES]
    assert sum(text.count("\n") for text in texts) <= 18_340
    assert sum(map(num_tokens, texts)) <= 127_396
    assert sum(map(num_packed, texts)) <= 47
    files = [file for name in ("minitri", "tests", "tools", "docs") for file in python_files(name)]
    assert sum(file.read_text(encoding="utf-8").count("fmt" + ": skip") for file in files) <= 25
    assert sum(map(num_lines, python_files("tests"))) <= 24_466
    assert sum(num_lines(file) for file in PACKAGE.rglob("cpu/*.[ch]*")) <= 1_988


def test_what_a_run_needs_is_short_enough_to_read():
    """The modules that importing the engine reads."""
    program = "import sys, minitri.engine; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    seen = set(run.stdout.split())
    files = [file for file in FILES if f"minitri.{module_name(file)}" in seen]
    files = [file for file in files if file.name != "__init__.py"]
    assert len(files) <= 53
    assert sum(map(num_lines, files)) <= 7_719


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def num_packed(text: str) -> int:
    """Assignments such as `a, b = x, y`."""
    nodes = ast.walk(ast.parse(text))
    pairs = ((it.targets[0], it.value) for it in nodes if isinstance(it, ast.Assign))
    return sum(all(isinstance(side, ast.Tuple) for side in pair) for pair in pairs)


def num_tokens(source: str) -> int:
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in layout | {tokenize.ENDMARKER} and token.start not in docstrings
        for token in tokens
    )


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
        assert len(files) <= (22 if folder == PACKAGE else 12)


def test_no_two_modules_have_one_name():
    names = Counter(file.name for file in FILES)
    shared = {"__init__.py", "__main__.py"}
    assert {name for name, count in names.items() if count > 1} <= shared


def test_transformers_is_never_imported(folder):
    program = (
        "import sys, minitri, minitri.apps.bench, minitri.generate\n"
        f"run = minitri.load({str(folder)!r}).generate('She had')\n"
        "next(run), next(run)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    names = {name.split(".")[0] for file in FILES for name in imported(file)}
    assert names.isdisjoint({"transformers", "tools", "tests"})
