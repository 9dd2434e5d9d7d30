"""Bugs put into the product on purpose: a change of a line of a real function, while it runs.

`mutated` compiles the changed source of the whole module and gives the function the code that comes
of it, so everybody who holds the function sees the change: `from x import y` included. `run_tests`
runs tests while a bug is in, and says how they ended.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

import pytest

NO_PLUGINS = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"]
"""The last two collect garbage at the end, which takes longer than most tests here."""


@dataclass(frozen=True)
class Mutant:
    """A bug: in `function` (module and qualified name) the text `old` reads `new`."""

    name: str
    function: str
    old: str
    new: str
    killer: str
    """The test that notices it, as pytest names it from `tests/` on."""


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The product with this bug."""
    function, file = find(mutant.function)
    source, healthy = file.read_text(), function.__code__
    start, end = span(source, healthy.co_qualname)
    assert source[start:end].count(mutant.old) == 1, f"{mutant.name}: the text is not there once"
    changed = source[:start] + source[start:end].replace(mutant.old, mutant.new) + source[end:]
    function.__code__ = code_of(compile(changed, str(file), "exec"), healthy.co_qualname)
    try:
        yield
    finally:
        function.__code__ = healthy


def find(name: str) -> tuple[FunctionType, Path]:
    """A function or method of this name, without decorators, and its file."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = module = importlib.import_module(".".join(parts[:n]))
            break
    for part in parts[n:]:
        found = inspect.getattr_static(found, part)
    found = getattr(found, "__func__", getattr(found, "fget", found))
    return inspect.unwrap(found), Path(module.__file__)


def span(source: str, qualname: str) -> tuple[int, int]:
    """Where a function's text begins and ends."""
    body = ast.parse(source).body
    for part in qualname.split("."):
        [node] = [item for item in body if getattr(item, "name", None) == part]
        body = getattr(node, "body", [])
    lines = source.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


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

    seconds: float = 0.0
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
    outcome, started = Outcome(), time.perf_counter()
    options = ["-x", "-q", "--no-header", "-o", "addopts=", *NO_PLUGINS]
    with contextlib.chdir(Path(__file__).parent), pytest.MonkeyPatch.context() as patching:
        patching.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patching.delenv("PYTEST_ADDOPTS", raising=False)
        pytest.main([*options, *names], plugins=[outcome])
    outcome.seconds = time.perf_counter() - started
    return outcome
