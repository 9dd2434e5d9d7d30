"""Bugs put into the product on purpose: a change of a function's code, while it runs.

The function itself gets the changed code, so everybody who holds it sees the change. A mutant names
a part of the code as `ast.unparse` writes it: how the source is laid out does not count.
"""

import ast
import contextlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Mutant:
    """A bug: in `function` what stands there once, `old`, reads `new`."""

    name: str
    function: str
    """MODULE:FUNCTION, from `minitri` on."""
    old: str
    new: str
    killer: str = ""
    """The test that notices it, as pytest names it from `tests/` on."""
    is_quick: bool = False


def read_table(file: Path) -> list[Mutant]:
    """Mutants of a file: tests, and under each its bugs."""
    mutants, killer = list[Mutant](), ""
    for line in re.sub(r"\n {4,}", " ", file.read_text("utf-8")).splitlines():
        if line.startswith("  "):
            name, bug = line.strip().split(" | ")
            place, new = bug.split(" => ")
            function, old = place.split(": ", 1)
            mutants.append(Mutant(name.strip("* "), function, old, new, killer, name[0] == "*"))
        elif not line.startswith("#"):
            killer = line
    return mutants


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    function = pkgutil.resolve_name(f"minitri.{mutant.function}")
    for wrapped in ("__func__", "fget", "func"):
        function = getattr(function, wrapped, function)
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].name, tree.body[0].decorator_list = "made", []  # it may call its namesake
    before, *after = ast.unparse(tree).split(mutant.old)
    assert len(after) == 1, f"{mutant.name}: the code is there {len(after)} times"
    body = textwrap.indent(before + mutant.new + after[0], " ")
    code = f"def make(__class__):\n{body}\n return made"  # `super()` needs its class
    exec(code, function.__globals__, found := {})
    healthy = function.__code__
    function.__code__ = found["make"](None).__code__
    try:
        yield
    finally:
        function.__code__ = healthy


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
