"""Mutation testing: changes the code by one small step at a time, and says which test notices.

    python -m tools.mutation_testing --seed 1 --count 80

Takes `count` of all changes of a few kinds in the files that decide what the text is: another
operator or number, a bound of a slice or a statement left out, `min` for `max`, a call such as
`.clone()` dropped. Each is made in a copy of the package, in which the tests of `SUITE` run until
one fails. A run longer than `--limit` counts as noticed: loops do not end. Prints a markdown table;
what survives comes first, for a human to say whether it changes the output at all. The same seed
makes the same changes, as long as the files are the same. Takes seconds per change that is noticed
and about a minute per survivor.
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
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {
    "core": "runner memory stack scheduler generation",
    "core/decoding": "sampling verification cascade level random_source noise text_filters",
    "core/drafters": "draft_model",
    "core/caches": "full policies prefixes retrieval streaming",
    "devices/parallel": "split",
    "files": "snapshots",
    "text": "text_stream reader filters",
    "trees": "walk tree_level",
}
"""Modules that decide what the text is, by room."""
FILES = [f"minitri/{room}/{name}.py" for room, names in ROOMS.items() for name in names.split()]
SUITE = [
    "runner",
    "noise",
    "random_source",
    "enumeration",
    "switching_plans",
    "caches_after_steps",
    "streaming_cache",
    "retrieval_cache",
    "sampling",
    "equality",
]
"""Tests of exactness wherever they are, quick ones first: `test_NAME.py`."""
SLOW = "not far_beyond and not 4-2-2 and not greedy and not ngram-coupled and not itself-coupled"
"""Leaves out their longest runs, of claims that shorter ones make, too."""
FIRST = {
    "sampling": "sampling",
    "policies": "retrieval_cache",
    "retrieval": "retrieval_cache",
    "streaming": "streaming_cache",
    "draft_model": "streaming_cache",
    "memory": "session_pool",
    "prefixes": "prefixes",
    "snapshots": "prefixes",
    "filters": "text_filters",
    "text_filters": "text_filters",
    "reader": "engine",
    "text_stream": "engine",
    "generation": "engine",
    "scheduler": "fairness",
    "split": "split",
    "walk": "tree_sampling",
    "tree_level": "tree_sampling",
}
"""The tests that know a module best, which run first."""

OPERATORS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
    "not in": "in",
    "in": "not in",
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "+",
    "**": "*",
    "and": "or",
    "or": "and",
    "|": "&",
    "&": "|",
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "amax": "amin",
    "cumprod": "cumsum",
    "zeros": "ones",
}
DROPPED_CALLS = ("clone", "clamp_min", "clamp_max", "clamp_", "double", "float", "flip")
MEASURED = re.compile(r"perf_counter|stats|seconds|num_bytes|assert|raise|log\.|Error")
"""Lines that only measure or complain are left as they are."""


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of a file replaced."""

    file: str
    line: int
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
            self.found.append(Change(self.file, line, start, end, new))

    def between(self, left: ast.expr, right: ast.expr) -> None:
        """Another operator between two expressions."""
        start, end = self.end(left), self.start(right)
        match = re.search(rb"[^\s()]+( not| in)?", self.source[start:end])
        if match and match[0].decode() in OPERATORS:
            new = OPERATORS[match[0].decode()]
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
        if node.id in NAMES:
            self.add(self.start(node), self.end(node), NAMES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in NAMES:
            self.add(self.end(node) - len(node.attr), self.end(node), NAMES[node.attr])
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


class Recorder:
    """Notes which test failed first."""

    killer = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.killer:
            self.killer = f"{report.nodeid} (import)"


def run_suite(copy: Path, tests: list[str], result: Path) -> None:
    """In a process of its own: runs tests of the copy until one fails, writes which."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a change may ask for anything
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    recorder = Recorder()
    off = ("cacheprovider", "unraisableexception", "threadexception")
    plugins = [word for name in off for word in ("-p", f"no:{name}")]
    os.environ.pop("PYTEST_ADDOPTS", None)
    code = pytest.main(
        ["-x", "-q", "-o", "addopts=", "-k", SLOW, *plugins, *tests], plugins=[recorder]
    )
    result.write_text(json.dumps([int(code), recorder.killer]))


def fate(copy: Path, tests: list[str], limit: float) -> tuple[str, float]:
    """The test that fails, if any, and the seconds until then."""
    result, started = copy / "result.json", time.perf_counter()
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=run_suite, args=(copy, tests, result)
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


def suite_for(file: str) -> list[str]:
    """Paths of the tests, those that know the file best first. Raises `SystemExit` if one is not
    there."""
    first = FIRST.get(Path(file).stem, SUITE[0])
    paths = []
    for name in dict.fromkeys([first, *SUITE]):
        found = [*ROOT.glob(f"tests/**/test_{name}.py")]
        if not found:
            raise SystemExit(f"there is no tests/**/test_{name}.py; correct SUITE and FIRST")
        paths += [str(path.relative_to(ROOT)) for path in found]
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=80, help="changes to make")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each at most")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the changes to try")
    args = parser.parse_args(argv)
    from transformers import LlamaForCausalLM  # noqa: F401  (a fork has what takes long to import)

    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True  # a change may keep a file's size and its second
    changes = list(all_changes())
    print(f"{len(changes)} changes are possible", file=sys.stderr)
    chosen = random.Random(args.seed).sample(changes, min(args.count, len(changes)))
    chosen.sort(key=lambda change: (FILES.index(change.file), change.start))
    rows: list[tuple[bool, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns("__pycache__")
        for name in ("minitri", "tests", "tools"):
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        healthy, seconds = fate(copy, suite_for(""), 10 * args.limit)
        if healthy:
            raise SystemExit(f"{healthy} fails without any change")
        print(f"all tests pass without a change, in {seconds:.0f} s", file=sys.stderr)
        for number, change in enumerate(chosen):
            if args.only and number not in args.only:
                continue
            file, source = copy / change.file, (ROOT / change.file).read_bytes()
            file.write_bytes(change.apply(source))
            killer, seconds = fate(copy, suite_for(change.file), args.limit)
            file.write_bytes(source)
            name = killer.rpartition("::")[2].partition("[")[0] or "**survives**"
            text = f"| {number} | {change.describe(source)} | {name} | {seconds:.0f} |"
            print(text, file=sys.stderr, flush=True)
            rows.append((bool(killer), text))
    print("| | line | change | noticed by | seconds |\n|---|---|---|---|---|")
    print("\n".join(text for _, text in sorted(rows, key=lambda row: row[0])))
    num_survivors = sum(not dead for dead, _ in rows)
    print(json.dumps({"changes": len(rows), "survivors": num_survivors, "seed": args.seed}))


if __name__ == "__main__":
    main()
