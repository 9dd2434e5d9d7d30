"""Bugs put into the product on purpose: a change of a function's syntax tree, while it runs.

The function itself gets the changed code, so everybody who holds it sees the change. A mutant names
the structure that it changes: `_` in it stands for any expression.
"""

import ast
import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType

import pytest

import minitri

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
    is_quick: bool = False


def read_table(table: str) -> list[Mutant]:
    """Mutants of a text: tests, names and changes by their indentation."""
    mutants: list[Mutant] = []
    killer, name, change = "", "", ""
    for line in [*table.splitlines(), "end"]:
        depth = len(line) - len(line.lstrip())
        if depth < 4 and change:
            place, new = change.split(" => ")
            function, old = place.split(": ", 1)
            mutants.append(Mutant(name.strip("* "), function, old, new, killer, name[0] == "*"))
            change = ""
        if depth >= 4:
            change = f"{change} {line.strip()}".strip()
        elif depth == 2:
            name, _, change = line.strip().partition(" | ")
        elif line and not line.startswith("#"):
            killer = (killer + line).replace("::[", "[") if line.startswith("::") else line
    return mutants


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The product with this bug."""
    function = find(mutant.function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].decorator_list = []
    replacer = Replacer(mutant.old, mutant.new)
    replacer.visit(tree)
    assert replacer.count == 1, f"{mutant.name}: the code is there {replacer.count} times"
    found: dict[str, FunctionType] = {}
    exec(compile(ast.fix_missing_locations(tree), PACKAGE, "exec"), function.__globals__, found)
    healthy = function.__code__
    function.__code__ = found[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = healthy


class Replacer(ast.NodeTransformer):
    """Puts other code where an expression or a statement stands."""

    def __init__(self, old: str, new: str) -> None:
        self.count = 0
        [self.old], self.new = ast.parse(old).body, ast.parse(new).body
        if isinstance(self.old, ast.Expr) and isinstance(self.new[0], ast.Expr):
            self.old, self.new = self.old.value, self.new[0].value

    def visit(self, node):
        if not matches(self.old, node):
            return self.generic_visit(node)
        self.count += 1
        return self.new


def matches(pattern: object, node: object) -> bool:
    """Whether code has the structure of a pattern."""
    if isinstance(pattern, ast.Name) and pattern.id == "_":
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(map(matches, pattern, node))
    if isinstance(pattern, ast.AST):
        return matches([*vars_of(pattern)], [*vars_of(node)])
    return pattern == node


def vars_of(node: ast.AST) -> Iterator[object]:
    return (getattr(node, name, None) for name in node._fields if name != "ctx")


def find(name: str) -> FunctionType:
    """The function or method of a name, FUNCTION or FILE:FUNCTION, without decorators."""
    place, _, qualname = name.rpartition(":")
    outer, _, last = qualname.rpartition(".")
    found = set()  # a module may import what another one defines
    for file in PACKAGE.rglob(f"{place or '*'}.py"):
        text = file.read_text()
        if f"def {last}(" in text and f"class {outer}" in text + "class ":
            parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
            function = importlib.import_module(".".join(parts))
            for part in qualname.split("."):
                function = inspect.getattr_static(function, part, None)
            found.add(function)
    [function] = found - {None}
    for wrapped in ("__func__", "fget", "func"):
        function = getattr(function, wrapped, function)
    return inspect.unwrap(function)


@dataclass
class Outcome:
    """How tests ended that ran inside a test."""

    num_passed: int = 0
    errors: list[type[BaseException]] = field(default_factory=list)
    """What the failed ones raised, in setup and teardown too."""

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.failed:
            self.errors.append(call.excinfo.type)
        self.num_passed += report.when == "call" and report.passed


def run_tests(*names: str) -> Outcome:
    """Runs tests in this process and says how they ended; stops at the first failure."""
    outcome = Outcome()
    # The last two plugins collect garbage at the end, which takes longer than most tests here.
    off = [f"-pno:{name}" for name in ("cacheprovider", "unraisableexception", "threadexception")]
    with contextlib.chdir(Path(__file__).parent), pytest.MonkeyPatch.context() as patching:
        patching.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patching.delenv("PYTEST_ADDOPTS", raising=False)
        pytest.main(["-x", "-q", "--no-header", "-o", "addopts=", *off, *names], plugins=[outcome])
    return outcome
