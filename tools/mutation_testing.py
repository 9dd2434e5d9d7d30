"""Mutation testing: changes the code by one small step at a time, and says which test notices.

    python -m tools.mutation_testing --record map.json            once, 15 to 30 minutes
    python -m tools.mutation_testing --map map.json --seed 1 --count 150

The first command runs the tests that run by default, under coverage (`pip install pytest-cov`), and
notes which test executes which line, and its seconds. The second takes `count` of all changes of a
few kinds in the rooms core, devices, text and files: another operator or number, a bound of a slice
or a statement left out, `min` for `max`, a call such as `.clone()` dropped. Each is made in a copy
of the package, in which the tests that execute the line run, quick ones first, until one fails. A
run longer than `--limit` counts as noticed: loops do not end. Prints a markdown table; survivors
come first, for a human to say whether it changes the output at all, and a table by room. The same
seed makes the same changes as long as the code, comments aside, is the same.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core", "devices", "text", "files")
FILES = [
    str(path.relative_to(ROOT))
    for room in ROOMS
    for path in sorted((ROOT / "minitri" / room).rglob("*.py"))
]
MOST_TESTS = 300
"""Tests that run for a change at most, quick ones first, ..."""
MOST_SECONDS = 60.0
"""... and the seconds that they took when they were recorded."""

BOTH_WAYS = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in", "+": "-", "|": "&"}
BOTH_WAYS |= {"and": "or", "min": "max", "any": "all", "clamp_min": "clamp_max"}
ONE_WAY = {"*": "+", "/": "*", "//": "*", "%": "+", "**": "*"}
ONE_WAY |= {"amax": "amin", "cumprod": "cumsum", "zeros": "ones"}
REPLACED = BOTH_WAYS | {new: old for old, new in BOTH_WAYS.items()} | ONE_WAY
"""Operators and names, by what takes their place."""
DROPPED_CALLS = ("clone", "clamp_min", "clamp_max", "clamp_", "double", "float", "flip")
MEASURED = re.compile(r"perf_counter|stats|seconds|num_bytes|assert|raise|log\.|Error")
"""Lines that only measure or complain are left as they are."""


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of a file replaced."""

    file: str
    line: int
    first_line: int
    """Where its statement begins."""
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """Two cells of a table: `file:line`, and the line with the change marked."""
        before, after = source[: self.start], source[self.end :]
        change = f"⟦{source[self.start : self.end].decode()} → {self.new}⟧"
        line = before.split(b"\n")[-1].decode() + change + after.split(b"\n")[0].decode()
        name = self.file.removeprefix("minitri/").removesuffix(".py")
        return f"{name}:{self.line} | `{line.strip().replace('|', chr(92) + '|')}`"


class Finder(ast.NodeVisitor):
    """Collects all changes of a file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.starts = [sum(lengths[:n]) for n in range(len(lengths))]
        self.found: list[Change] = []
        self.first_line = 1

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):
            self.first_line = node.lineno
        return super().visit(node)

    def at(self, line: int | None, column: int | None) -> int:
        return self.starts[(line or 1) - 1] + (column or 0)

    def start(self, node: Any) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.at(node.end_lineno, node.end_col_offset)

    def add(self, start: int, end: int, new: str) -> None:
        """A change, unless it is of several lines or of one that only measures."""
        line = self.source.count(b"\n", 0, start) + 1
        text = self.source.splitlines()[line - 1].decode()
        if b"\n" not in self.source[start:end] and not MEASURED.search(text):
            first = min(self.first_line, line)
            self.found.append(Change(self.file, line, first, start, end, new))

    def between(self, left: ast.expr, right: ast.expr) -> None:
        """Another operator between two expressions."""
        start, end = self.end(left), self.start(right)
        match = re.search(rb"[^\s()]+( not| in)?", self.source[start:end])
        if match and match[0].decode() in REPLACED:
            new = REPLACED[match[0].decode()]
            self.add(start + match.start(), start + match.end(), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.between(left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.between(node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.operand, ast.Constant):
            return  # -1 is most often the last dimension
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(self.start(node), self.start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(self.start(node), self.end(node), str(not node.value))
        elif isinstance(node.value, int):
            for new in (node.value + 1, node.value - 1):
                self.add(self.start(node), self.end(node), str(new))
        elif isinstance(node.value, float):
            self.add(self.start(node), self.end(node), str(node.value + 0.5))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in REPLACED:
            self.add(self.start(node), self.end(node), REPLACED[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in REPLACED:
            self.add(self.end(node) - len(node.attr), self.end(node), REPLACED[node.attr])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
            self.add(self.end(node.func.value), self.end(node), "")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self.add(self.start(bound), self.end(bound), "")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add(self.start(node), self.end(node), "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(self.start(node), self.end(node), "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for item in [*node.args.defaults, *node.args.kw_defaults, *node.body]:
            if item is not None:
                self.visit(item)


def all_changes() -> Iterator[Change]:
    """Every change of the files that compiles."""
    for file in FILES:
        source = (ROOT / file).read_bytes()
        finder = Finder(file, source)
        finder.visit(ast.parse(source))
        for change in finder.found:
            try:
                compile(change.apply(source), file, "exec")
            except SyntaxError:
                continue
            yield change


def record(file: Path) -> None:
    """Runs the default tests under coverage, and writes their seconds and lines as JSON."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data_file, report = Path(folder) / "coverage", Path(folder) / "report.xml"
        options = ["--cov=minitri", "--cov-branch", "--cov-context=test", "--cov-report="]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}"],
            cwd=ROOT,
            env={**os.environ, "COVERAGE_FILE": str(data_file)},
            check=False,
        )
        data = CoverageData(str(data_file))
        data.read()
        file.write_text(json.dumps(map_of(data, ET.parse(report), ROOT)))


def map_of(data: Any, report: Any, root: Path) -> dict[str, Any]:
    """Seconds of each test that passed, and by file and line the tests that execute it."""
    seconds: dict[str, float] = {}
    for case in report.iter("testcase"):
        if len(case) and case[0].tag in {"failure", "error", "skipped"}:
            continue
        seconds[f"{case.get('classname')}::{case.get('name')}"] = float(case.get("time"))
    tests: dict[str, float] = {}
    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in FILES:
        for line, contexts in data.contexts_by_lineno(str(root / name)).items():
            for context in {context.partition("|")[0] for context in contexts}:
                place, _, test = context.partition("::")
                key = f"{place.removesuffix('.py').replace('/', '.')}::{test}"
                if key in seconds:
                    tests[context] = seconds[key]
                    lines[name][line].append(context)
    return {"tests": tests, "lines": lines}


def tests_of(change: Change, recorded: dict[str, Any]) -> list[str]:
    """The tests that execute a change, quick ones first; at import: those that execute its file."""
    seconds = recorded["tests"]
    by_line = recorded["lines"].get(change.file, {})
    lines = range(change.first_line, change.line + 1)
    tests = {test for line in lines for test in by_line.get(str(line), ())}
    tests = tests or {test for names in by_line.values() for test in names}
    chosen: list[str] = []
    left = MOST_SECONDS
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        left -= seconds[test]
        if chosen and (left < 0 or len(chosen) == MOST_TESTS):
            break
        chosen.append(test)
    return chosen


class Recorder:
    """Notes which test failed first."""

    killer = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def run_tests(copy: Path, tests: list[str], result: Path) -> None:
    """In a process of its own: runs tests of the copy until one fails, writes which."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a change may ask for anything
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for name in [*sys.modules]:  # `tools` has imported the package without the change
        if name.partition(".")[0] in ("minitri", "tools"):
            del sys.modules[name]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    recorder = Recorder()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--basetemp={copy}/temp"]
    code = pytest.main([*options, *tests], plugins=[recorder])
    result.write_text(json.dumps([int(code), recorder.killer]))


def fate(copy: Path, tests: list[str], limit: float) -> tuple[str, float]:
    """The test that fails, if any, and the seconds until then."""
    if not tests:
        return "", 0.0
    result, started = copy / "result.json", time.perf_counter()
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=run_tests, args=(copy, tests, result)
    )
    process.start()
    process.join(limit)
    seconds = time.perf_counter() - started
    if process.is_alive():
        process.kill()
        process.join()
        return "does not end", seconds
    if not result.exists():
        return f"the process died ({process.exitcode})", seconds
    code, killer = json.loads(result.read_text())
    return killer or f"pytest ended with {code}" if code else "", seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the map of the tests")
    parser.add_argument("--map", type=Path, metavar="FILE", help="the map to use")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150, help="changes to make")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each at most")
    parser.add_argument("--jobs", type=int, default=1, help="changes tried at a time")
    args = parser.parse_args(argv)
    if args.record:
        record(args.record)
        return
    if args.map is None:
        parser.error("give --record FILE first, then --map FILE")
    from transformers import LlamaForCausalLM  # noqa: F401  (a fork has what takes long to import)

    sys.dont_write_bytecode = True  # a change may keep a file's size and its second
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    recorded = json.loads(args.map.read_text())
    changes = list(all_changes())
    print(f"{len(changes)} changes are possible", file=sys.stderr)
    chosen = random.Random(args.seed).sample(changes, min(args.count, len(changes)))
    chosen.sort(key=lambda change: (FILES.index(change.file), change.start))
    copies: SimpleQueue[Path] = SimpleQueue()

    def trial(number: int) -> tuple[bool, str, str]:
        """Whether change `number` is noticed, its row of the table, and its room."""
        change, copy = chosen[number], copies.get()
        source = (ROOT / change.file).read_bytes()
        (copy / change.file).write_bytes(change.apply(source))
        tests = tests_of(change, recorded)
        killer, seconds = fate(copy, tests, args.limit)
        (copy / change.file).write_bytes(source)
        copies.put(copy)
        name = killer.rpartition("::")[2].partition("[")[0] or "**survives**"
        text = f"| {number} | {change.describe(source)} | {name} | {len(tests)} | {seconds:.0f} |"
        print(text, file=sys.stderr, flush=True)
        return bool(killer), text, change.file.split("/")[1]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        for job in range(args.jobs):
            copy = Path(folder) / str(job)
            ignored = shutil.ignore_patterns("__pycache__", ".git", "weights", "build")
            shutil.copytree(ROOT, copy, ignore=ignored)
            copies.put(copy)
        rows = list(pool.map(trial, range(len(chosen))))
    print("| | line | change | noticed by | tests | seconds |\n|---|---|---|---|---|---|")
    print("\n".join(text for _, text, _ in sorted(rows, key=lambda row: row[0])))
    totals, dead = Counter(row[2] for row in rows), Counter(row[2] for row in rows if row[0])
    print("\n| room | changes | noticed |\n|---|---|---|")
    print("\n".join(f"| {room} | {totals[room]} | {dead[room]} |" for room in totals))


if __name__ == "__main__":
    main()
