"""The walk through the algorithm: its pages quote what its files print, and name what is there."""

import html
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from minitri.generate import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/chapters").glob("*.md"))
CHAPTERS = PAGES[:-1]
NAMES = [page.stem for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def code_of(page: Path) -> Path:
    return ROOT / "docs/code" / f"{page.stem}.py"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


@pytest.mark.parametrize("page", CHAPTERS, ids=NAMES[:-1])
def test_a_page_is_short_and_quotes_what_its_file_prints(page, capsys):
    """The last block of text in a page; the file itself is put in where the site is built."""
    blocks = FENCE.findall(page.read_text("utf-8"))
    assert len(code_of(page).read_text("utf-8").splitlines()) <= 61
    assert 500 <= len(prose(page).split()) <= 930
    assert ("python", f'--8<-- "code/{page.stem}.py"\n') in blocks
    assert f"`python docs/code/{page.stem}.py`" in prose(page)
    runpy.run_path(str(code_of(page)), run_name="__main__")
    assert capsys.readouterr().out == [text for kind, text in blocks if kind == "text"][-1]


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


def test_the_site_builds_with_all_links_and_needs_no_network(tmp_path):
    pytest.importorskip("mkdocs", reason='needs pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    config = ROOT / "docs/mkdocs.yml"
    run = subprocess.run([*command, tmp_path, "-f", config], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr  # as it is not after a warning
    for page in PAGES:
        site = (tmp_path / f"{page.stem}.html").read_text("utf-8")
        assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//[^"]*"', site)
        if page in CHAPTERS:
            shown = html.unescape(re.sub(r"<[^>]+>", "", site))
            assert code_of(page).read_text("utf-8").strip() in shown
