"""Item: a table or figure of the paper as cells, measured one by one, and their summary.

An item is a value, `Item`, of one module in `items/`. Its cells are plain JSON, so that a study can
name, keep and resume them; `measure` makes numbers of one cell, `show` makes tables, a picture and
a verdict of all. `show` sees only what was kept, so a report is the same after any interruption.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.paper.scale import Scale

if TYPE_CHECKING:
    from tools.paper.lab import Lab

Json = dict[str, Any]
PUBLISHED: Json = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
"""Published title, claim in one sentence, and numbers of each item."""
Draw = Callable[[Any], None]
"""Draws on the axes of matplotlib."""


@dataclass(frozen=True)
class Done:
    """A cell that was measured."""

    settings: Json
    values: Json
    seconds: float = 0.0
    origin: dict[str, str] = field(default_factory=dict)
    """Commit, machine, version of PyTorch and command."""


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """Note on the numbers: units, medians, what the brackets hold."""

    def markdown(self) -> str:
        """The table, and its note below it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{text}\n\n{self.note}\n" if self.note else f"{text}\n"


@dataclass(frozen=True)
class Shown:
    """Summary of all cells of an item."""

    tables: Sequence[Table]
    verdict: str
    """Does the paper's claim hold here? One or two sentences, from the numbers."""
    draw: Draw


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper."""

    name: str
    """On the command line."""
    cells: Callable[[Scale], list[Json]]
    """Settings of all measurements, those that share a text or a model next to each other."""
    measure: "Callable[[Lab, Json], Json]"
    """Raises `InputError` where a text is too short."""
    show: Callable[[list[Done], Scale], Shown]
    minutes_here: float
    """Minutes of all cells on 2 cores of an EPYC at the scale `cpu`, as measured."""
    minutes_gpu: float
    """Minutes of all cells at the scale `gpu` on an H200, as predicted."""

    @property
    def title(self) -> str:
        return str(PUBLISHED[self.name]["title"])

    @property
    def claim(self) -> str:
        return str(PUBLISHED[self.name]["claim"])
