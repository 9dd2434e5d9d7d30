"""The paper by command: a study loses nothing whenever it is stopped, and its report is whole."""

import json
from functools import partial
from pathlib import Path

import pytest

from tools.paper import __main__ as program
from tools.paper.items import ITEMS
from tools.paper.scale import SCALES


@pytest.fixture
def run(call):
    return partial(call, program.main, "--scale", "tiny")


def written() -> dict[str, bytes]:
    files = [file for file in Path("study").iterdir() if file.suffix in {".html", ".md", ".png"}]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cells_are_json_and_each_is_measured_once(scale):
    """Cells are found again by their JSON."""
    for item in ITEMS:
        cells = item.cells(scale)
        assert json.loads(json.dumps(cells)) == cells
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells) > 0


@pytest.mark.slow
def test_every_item_is_whole(run, tmp_path, monkeypatch):
    """Every cell of every table is filled, every picture drawn; cells that are lost are measured
    again, and damaged ones, too."""
    monkeypatch.chdir(tmp_path)
    assert run("all").code == 0
    before = written()
    page, html = before["report.md"].decode(), before["report.html"].decode()
    assert "not all is measured" not in page
    assert all(item.claim in page for item in ITEMS)
    assert html.count("<img") == sum(name.endswith(".png") for name in before)
    rows = [line.partition(" | ")[2] for line in page.splitlines() if line.startswith("| ")]
    assert not any("|  |" in row for row in rows)
    lost, damaged, *_ = Path("study").glob("cells/exactness/*.json")
    lost.unlink()
    damaged.write_bytes(b"[1, 2]")
    done = run("all", "--quiet")
    assert done.err.count(" is damaged: it is measured again\n") == 1
    assert written() == before
