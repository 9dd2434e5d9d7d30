"""The walk through the algorithm: its pages quote what its files print, and name what is there."""

import json
import re
import runpy
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from minitri.generate import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/chapters").glob("*.md"))
CHAPTERS = PAGES[:-2]  # those with a file of their own
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_page_quotes_what_its_file_prints(page, capsys):
    """The last block of text in a page; the file itself is put in where the site is built."""
    blocks, code = FENCE.findall(page.read_text("utf-8")), ROOT / f"docs/code/{page.stem}.py"
    assert ("python", f'--8<-- "code/{page.stem}.py"\n') in blocks
    assert f"`python docs/code/{page.stem}.py`" in prose(page)
    runpy.run_path(str(code), run_name="__main__")
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


@pytest.mark.slow
def test_names_are_links_to_lines_in_the_site(tmp_path):
    build(load_config(str(ROOT / "docs/mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    page = (tmp_path / "01_speculative_sampling.html").read_text("utf-8")
    [(file, line)] = re.findall(r'href="([^"]+)#([^"]+)"><code>reference.py::verify_one<', page)
    assert f'id="{line}"' in (tmp_path / file).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_read_in_ten_minutes_and_its_paths_names_and_flags_exist(page):
    text = prose(page).replace("\n", " ")
    paths = re.findall(r"`((?!build/)(?:[\w.]+/)+[\w.]*)(?:::([\w.]+))?`", text)
    assert 500 <= len(text.split()) <= 930
    for path, name in paths:
        assert (ROOT / path).exists(), path
        for part in name.split(".") if name else ():
            defined = rf"^ *(?:def|class) {part}\b"
            assert re.search(defined, (ROOT / path).read_text("utf-8"), re.M), name
    assert {*re.findall(r"`(--[\w-]+)", text)} <= {*build_parser()._option_string_actions}
