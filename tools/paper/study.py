"""A study on disk: every cell is a file of its own, written when it is measured and never lost.

    DIR/cells/table2/3f0c....json   settings, values, seconds, commit, machine, command
    DIR/table2.md, .png, .json      what all cells of an item say
    DIR/report.html                 all items (`report.py`)

A cell is known by its item, settings and scale, so a study that was stopped goes on with the cells
that are missing. What was measured by another commit is kept, and named in the report.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minitri.log import log
from tools.paper.item import Done, Item, Json
from tools.paper.lab import Lab


def write(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: it is the old one until it is the new one. Raises `OSError`."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    number, unfinished = tempfile.mkstemp(".unfinished", path.name, path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        changes = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=10", "HEAD") + changes
    return "unknown"


def machine() -> str:
    """The GPU, or the processor and its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


@dataclass
class Study:
    """Measures what is missing, and knows what is there."""

    out: Path
    lab: Lab
    again: bool = False
    """Measure cells of other commits again."""
    origin: Json = field(default_factory=dict)
    """Where and how cells are measured now."""

    def __post_init__(self) -> None:
        self.origin = {"commit": commit(), "machine": machine(), "torch": torch.__version__}
        self.origin["command"] = shlex.join(["python", "-m", "tools.paper", *sys.argv[1:]])

    def file(self, item: Item, settings: Json) -> Path:
        """Where a cell is kept."""
        known = [item.name, settings, self.lab.identity]
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        return self.out / "cells" / item.name / f"{key}.json"

    def read(self, item: Item, settings: Json) -> Json | None:
        """A cell that was measured, whole; None if it is to be measured."""
        path = self.file(item, settings)
        if not path.exists():
            return None
        try:
            cell: Json = json.loads(path.read_text(encoding="utf-8"))
            is_whole = cell["settings"] == settings and isinstance(cell["values"], dict)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            log.warning("%s is damaged: it is measured again", path)
            return None
        return None if self.again and cell["commit"] != self.origin["commit"] else cell

    def done(self, item: Item) -> list[Done]:
        """The cells of an item that were measured, in its order."""
        cells = (self.read(item, settings) for settings in item.cells(self.lab.scale))
        return [Done(cell["settings"], cell["values"]) for cell in cells if cell is not None]

    def origins(self, item: Item) -> list[Json]:
        """Of every cell: seconds, commit, machine, command."""
        cells = (self.read(item, settings) for settings in item.cells(self.lab.scale))
        names = ("seconds", *self.origin)
        return [{name: cell[name] for name in names} for cell in cells if cell is not None]

    def measure(self, item: Item, rest: Sequence[Item] = ()) -> None:
        """Measures the cells of an item that are missing; tells how long that takes, and the `rest`
        after it. Raises `InputError`, `OSError`."""
        all_cells = item.cells(self.lab.scale)
        for number, settings in enumerate(all_cells):
            if self.read(item, settings) is not None:
                continue
            minutes = math.ceil(sum(map(self.seconds_left, (item, *rest))) / 60)
            shown = ", ".join(f"{name} {value}" for name, value in settings.items())
            where = f"{item.name}, cell {number + 1} of {len(all_cells)}"
            log.info("%s: %s; about %d min left", where, shown, minutes)
            started = time.monotonic()
            values = item.measure(self.lab, settings)
            seconds = round(time.monotonic() - started, 2)
            cell = {"settings": settings, "values": values, "seconds": seconds, **self.origin}
            write(self.file(item, settings), json.dumps(cell, indent=1) + "\n")

    def seconds_left(self, item: Item) -> float:
        """By the cells of the item that are there, or else by what it took where it was written."""
        known = [it["seconds"] for it in self.origins(item)]
        total = len(item.cells(self.lab.scale))
        is_gpu = self.lab.scale.name == "gpu"
        usual = 60 * (item.minutes_gpu if is_gpu else item.minutes_here) / total
        return (total - len(known)) * (statistics.mean(known) if known else usual)
