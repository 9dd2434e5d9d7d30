"""The walk through the algorithm: its pages quote what its files print, and name what is there."""

import json
import re
import runpy
from pathlib import Path

import pytest

from minitri.generate import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/chapters").glob("*.md"))
CHAPTERS = PAGES[:-2]  # those with a file of their own
NAMES = [page.stem for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def code_of(page: Path) -> Path:
    return ROOT / "docs/code" / f"{page.stem}.py"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


@pytest.mark.parametrize("page", CHAPTERS, ids=NAMES[:-2])
def test_a_page_is_short_and_quotes_what_its_file_prints(page, capsys):
    """The last block of text in a page; the file itself is put in where the site is built."""
    blocks = FENCE.findall(page.read_text("utf-8"))
    assert len(code_of(page).read_text("utf-8").splitlines()) <= 61
    assert 500 <= len(prose(page).split()) <= 930
    assert ("python", f'--8<-- "code/{page.stem}.py"\n') in blocks
    assert f"`python docs/code/{page.stem}.py`" in prose(page)
    runpy.run_path(str(code_of(page)), run_name="__main__")
    assert capsys.readouterr().out == [text for kind, text in blocks if kind == "text"][-1]


@pytest.mark.slow
@pytest.mark.usefixtures("real_weights")
def test_the_notebook_runs_cell_by_cell(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {}
    for cell in json.loads((ROOT / "docs/tour.ipynb").read_text("utf-8"))["cells"]:
        assert len(cell["source"]) <= 12
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_names_and_flags_exist(page):
    text = prose(page).replace("\n", " ")
    paths = re.findall(r"`((?!build/)(?:[\w.]+/)+[\w.]*)(?:::([\w.]+))?`", text)
    assert len(paths) >= 2
    for path, name in paths:
        assert (ROOT / path).exists(), path
        for part in name.split(".") if name else ():
            defined = rf"^ *(?:def|class) {part}\b"
            assert re.search(defined, (ROOT / path).read_text("utf-8"), re.M), name
    assert {*re.findall(r"`(--[\w-]+)", text)} <= {*build_parser()._option_string_actions}
