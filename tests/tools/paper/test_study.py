"""The paper by command: a study loses nothing whenever it is stopped, and its report is whole."""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tools.paper import __main__ as program
from tools.paper import report
from tools.paper.item import PUBLISHED, Item, Shown, Table
from tools.paper.items import ITEMS
from tools.paper.scale import SCALES


class Visits(list):
    """Cells that were measured, in order."""

    def measure(self, lab, settings):
        self.append((settings["what"], settings["n"]))
        return {"by": {0.5: [settings["n"] ** 2, 1 / 3]}}


@pytest.fixture
def visits(monkeypatch, tmp_path):
    """Two items that stand for all, in an empty folder."""
    visits = Visits()

    def cells(scale, what):
        return [{"what": what, "n": n} for n in range(3)]

    def show(done, scale):
        rows = [[str(cell.settings["n"]), str(cell.values["by"]["0.5"])] for cell in done]
        return Shown([Table(["n", "its square"], rows)], "Holds.", lambda axes: axes.plot([0, 1]))

    items = []
    for name in ("one", "two"):
        items.append(Item(name, partial(cells, what=name), visits.measure, show, 2, 3))
        monkeypatch.setitem(PUBLISHED, name, {"title": f"Figure {name}", "claim": "Up."})
    for module in (program, report):
        monkeypatch.setattr(module, "ITEMS", items)
    monkeypatch.chdir(tmp_path)
    return visits


@pytest.fixture
def run(call):
    """The program with tiny sizes."""
    return partial(call, program.main, "--scale", "tiny")


def written() -> dict[str, bytes]:
    """The pages and pictures of the study in this folder."""
    files = [file for file in Path("study").iterdir() if file.suffix in {".html", ".md", ".png"}]
    return {file.name: file.read_bytes() for file in files}


def cell_files() -> list[Path]:
    return sorted(Path("study").glob("cells/*/*.json"))


@pytest.mark.parametrize(("number", "num_kept"), [(4, 0), (5, 1), (8, 3)])
def test_a_study_killed_at_any_moment_says_the_same(visits, run, number, num_kept):
    """When a file is put in its place, by a signal that nothing can handle. Three pages are written
    first; three cells of an item are followed by a picture and three pages."""
    replace, calls = Path.replace, []

    def fatal(*args):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    child = os.fork()
    if not child:
        Path.replace = fatal
        run("all")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(cell_files()) == num_kept
    assert run("all").code == 0
    assert len(visits) == 6 - num_kept
    resumed = written()
    shutil.rmtree("study")
    run("all")
    assert written() == resumed


def test_cells_are_known_by_texts_model_and_scale(visits, run):
    """A text of the same name with other content is another text."""
    for content in ("a", "b"):
        Path("it.txt").write_text(content)
        run("one", "--texts", "it.txt")
    run("one", "--texts", "it.txt", "--model", "other")
    assert len(visits) == len(cell_files()) == 9


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cells_are_json_and_each_is_measured_once(scale):
    """Else they would not be found again."""
    for item in ITEMS:
        cells = item.cells(scale)
        assert json.loads(json.dumps(cells)) == cells
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells) > 0


@pytest.mark.slow
def test_every_item_is_whole(run, tmp_path, monkeypatch):
    """Every cell of every table is filled, every picture drawn."""
    monkeypatch.chdir(tmp_path)
    assert run("all").code == 0
    before = written()
    page, html = before["report.md"].decode(), before["report.html"].decode()
    assert "not all is measured" not in page
    assert all(item.claim in page for item in ITEMS)
    assert html.count("<img") == sum(name.endswith(".png") for name in before)
    rows = [line.partition(" | ")[2] for line in page.splitlines() if line.startswith("| ")]
    assert not any("|  |" in row for row in rows)
