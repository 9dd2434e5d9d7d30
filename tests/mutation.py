"""Bugs put into the product on purpose: a change of a function's syntax tree, while it runs.

The function itself gets the changed code, so everybody who holds it sees the change.
"""

import ast
import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import pytest

import minitri

NO_PLUGINS = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"]
"""The last two collect garbage at the end, which takes longer than most tests here."""


PACKAGE = Path(minitri.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """A bug: in `function` the expression or statement `old` reads `new`."""

    name: str
    function: str
    old: str
    new: str
    killer: str
    """The test that notices it, as pytest names it from `tests/` on."""


def read_table(table: str) -> list[Mutant]:
    """Mutants of a text: tests, names and changes by their indentation."""
    found: list[Mutant] = []
    killer, name, change = "", "", ""
    for line in [*table.splitlines(), "", "  end"]:
        depth = len(line) - len(line.lstrip())
        if depth < 4 and change:
            place, new = change.split(" => ")
            function, old = place.split(": ", 1)
            found.append(Mutant(name, function, old, new, killer))
            change = ""
        if depth >= 4:
            change = f"{change} {line.strip()}".strip()
        elif depth == 2:
            name, _, change = line.strip().partition(" | ")
        elif line:
            killer = (killer + line).replace("::[", "[") if line.startswith("::") else line
    return found


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The product with this bug."""
    place, _, number = mutant.function.partition("#")
    file, qualname = find(place)
    tree = ast.parse(file.read_text())
    replacer = Replacer(mutant.old, mutant.new, int(number or 0))
    replacer.visit(node_at(tree, qualname))
    wanted = int(number) if number else 1
    assert replacer.count >= wanted, f"{mutant.name}: the text is not there"
    assert number or replacer.count == 1, f"{mutant.name}: the text is not there once"
    function = function_at(file, qualname)
    healthy = function.__code__
    compiled = compile(ast.fix_missing_locations(tree), str(file), "exec")
    function.__code__ = code_of(compiled, healthy.co_qualname)
    try:
        yield
    finally:
        function.__code__ = healthy


class Replacer(ast.NodeTransformer):
    """Puts other code where an expression or a statement stands, at its first or n-th place."""

    def __init__(self, old: str, new: str, number: int) -> None:
        olds, news = ast.parse(old).body, ast.parse(new).body
        self.count, self.number = 0, number or 1
        if all(isinstance(node, ast.Expr) for node in (*olds, *news)):
            olds, news = [olds[0].value], [news[0].value]
        [self.old], self.new = map(ast.dump, olds), news

    def visit(self, node):
        if ast.dump(node) != self.old:
            return self.generic_visit(node)
        self.count += 1
        if self.count != self.number:
            return node
        return self.new if isinstance(node, ast.stmt) else self.new[0]


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    """Every file of the package."""
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def find(name: str) -> tuple[Path, str]:
    """File and name of a function that a mutant names."""
    place, _, qualname = name.rpartition(":")
    files = [file for file, tree in parsed().items() if node_at(tree, qualname)]
    [file] = [it for it in files if ".".join(it.with_suffix("").parts).endswith(place)]
    return file, qualname


def node_at(tree: ast.AST, qualname: str) -> ast.AST | None:
    """The function or class of this name, if it is there."""
    part, _, rest = qualname.partition(".")
    found = [item for item in tree.body if getattr(item, "name", None) == part]
    return node_at(found[0], rest) if found and rest else next(iter(found), None)


def function_at(file: Path, qualname: str) -> FunctionType:
    """A function or method, without decorators."""
    module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    found = importlib.import_module(module)
    for part in qualname.split("."):
        found = inspect.getattr_static(found, part)
    for wrapped in ("__func__", "fget", "func"):
        found = getattr(found, wrapped, found)
    return inspect.unwrap(found)


def code_of(code: CodeType, qualname: str) -> CodeType:
    """The code of a function inside that of its module."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    for found in inner:
        if found.co_qualname == qualname:
            return found
    [outer] = [it for it in inner if qualname.startswith(it.co_qualname + ".")]
    return code_of(outer, qualname)


@dataclass
class Outcome:
    """How tests ended that ran inside a test."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[type[BaseException]] = field(default_factory=list)
    """What the failed ones raised, in setup and teardown too."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.failed:
            self.failed.append(item.nodeid)
            self.errors.append(call.excinfo.type)
        elif report.when == "call" and report.passed:
            self.passed.append(item.nodeid)


def run_tests(*names: str) -> Outcome:
    """Runs tests in this process and says how they ended; stops at the first failure."""
    outcome = Outcome()
    options = ["-x", "-q", "--no-header", "-o", "addopts=", *NO_PLUGINS]
    with contextlib.chdir(Path(__file__).parent), pytest.MonkeyPatch.context() as patching:
        patching.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patching.delenv("PYTEST_ADDOPTS", raising=False)
        pytest.main([*options, *names], plugins=[outcome])
    return outcome
