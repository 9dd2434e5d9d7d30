"""A study on disk: every cell is a file of its own, written when it is measured and never lost.

    DIR/cells/table2/3f0c....json   settings, values, seconds, origin
    DIR/report.html, .md, .json     what they say, with a picture of each item (`report.py`)

A cell is known by its item, settings, scale, model and texts, so a study that was stopped goes on
with the cells that are missing. Those of another commit are kept, and named in the report.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minitri.core.log import log
from tools.paper.item import Done, Item, Json
from tools.paper.lab import Lab

TINY_PACE = 0.005
"""Time of a tiny model's cell over that of the scale `cpu`, about."""


def write(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: it is the old one until it is the new one. Raises `OSError`."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> Done | None:
    """A cell that was measured; None if it is to be."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return Done(**json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            log.warning("%s is damaged: it is measured again", path)
    return None


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it."""
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=10"]
    with contextlib.suppress(OSError):
        where = Path(__file__).parent
        done = subprocess.run(git, cwd=where, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def machine() -> str:
    """The GPU, or the processor and the cores that PyTorch computes on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    known = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", known.read_text() if known.exists() else "")
    return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} cores"


@dataclass
class Study:
    """Knows what is there, and measures what is missing."""

    out: Path
    lab: Lab
    flags: str = ""
    """Flags of the command, with a space before each."""
    again: Sequence[Item] = ()
    """Items whose cells of other commits are measured again."""
    commit: str = field(default_factory=commit)
    machine: str = field(default_factory=machine)
    _cells: dict[str, list[Done | None]] = field(default_factory=dict)

    def command(self, item: Item) -> str:
        """Command that measures an item."""
        return f"python -m tools.paper {item.name}{self.flags}"

    def file(self, item: Item, settings: Json) -> Path:
        """Where a cell is kept."""
        known = [item.name, settings, self.lab.identity]
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        return self.out / "cells" / item.name / f"{key}.json"

    def cells(self, item: Item) -> list[Done | None]:
        """Cells of an item, in order; None where one is to be measured."""
        if item.name not in self._cells:
            cells = [read(self.file(item, it)) for it in item.cells(self.lab.scale)]
            if item in self.again:
                cells = [it if it and it.origin["commit"] == self.commit else None for it in cells]
            self._cells[item.name] = cells
        return self._cells[item.name]

    def done(self, item: Item) -> list[Done]:
        """Cells of an item that are measured."""
        return [cell for cell in self.cells(item) if cell is not None]

    def measure(self, item: Item, items: Sequence[Item]) -> None:
        """Measures the cells of an item that are missing; tells how long that takes for all
        `items`. Raises `InputError`, `OSError`."""
        cells = self.cells(item)
        origin = {"commit": self.commit, "machine": self.machine, "torch": torch.__version__}
        origin["command"] = self.command(item)
        for number, settings in enumerate(item.cells(self.lab.scale)):
            if cells[number] is not None:
                continue
            minutes = math.ceil(self.seconds_left(items) / 60)
            shown = ", ".join(f"{name} {value}" for name, value in settings.items())
            where = f"{item.name}, cell {number + 1} of {len(cells)}"
            log.info("%s: %s; about %d min left", where, shown, minutes)
            started = time.monotonic()
            values = item.measure(self.lab, settings)
            cell = Done(settings, values, round(time.monotonic() - started, 2), origin)
            path = self.file(item, settings)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, json.dumps(vars(cell), indent=1) + "\n")
            cells[number] = read(path)  # as after any interruption

    def seconds_left(self, items: Sequence[Item]) -> float:
        """Predicted seconds of the missing cells: what they took where the items were written,
        times the pace of the items that are complete here."""
        scale = self.lab.scale
        spent = usual = left = 0.0
        for item in items:
            seconds = 60 * (item.minutes_gpu if scale.name == "gpu" else item.minutes_here)
            cells, done = self.cells(item), self.done(item)
            left += seconds * (1 - len(done) / len(cells))
            if len(done) == len(cells):
                spent += sum(cell.seconds for cell in done)
                usual += seconds
        pace = 1.0 if scale.model else TINY_PACE
        return left * (spent / usual if usual else pace)
