"""The claims about the engine, a page made from the names of the tests of `minitri/core`.

    python -m tools.claims > docs/claims.md

A test's name is a claim, the docstring of its file their subject. The page is the specification
that the tests hold the engine to.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("core", "engine", "trees")
HEAD = """# What the tests claim

Made from the names of the tests by `python -m tools.claims`. Each line is a claim about the engine
that a test checks; the file in which it stands is named above it.
"""


def claims(tree: ast.Module) -> list[str]:
    """The tests of a file as sentences, in their order."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    words = [name.removeprefix("test_").replace("_", " ") for name in names if name[:5] == "test_"]
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in words]


def page() -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    for folder in FOLDERS:
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            tree = ast.parse(file.read_text("utf-8"))
            subject = ast.get_docstring(tree) or file.stem
            first = re.split(r"[.:;] ", " ".join(subject.split()))[0]
            yield f"## {first.rstrip('.:')}\n"
            yield f"`{file.relative_to(ROOT)}`\n"
            yield from (f"- {claim}" for claim in claims(tree))
            yield ""


if __name__ == "__main__":
    print("\n".join(page()), end="")
