"""The walk through the algorithm: its pages quote what its files print, and name what is there."""

import ast
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
CHAPTERS = [page for page in PAGES if page.stem != "index"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
QUESTIONS = ("bonus token", "recovered token", "q handed up", "mask on the prefix", "raw keys")
QUESTIONS += ("coupled", "not pay")


def by_name(page: Path) -> str:
    return page.stem


def code_of(page: Path) -> Path:
    return ROOT / "docs/code" / f"{page.stem}.py"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def sections(page: Path) -> dict[str, str]:
    """What stands under each heading, by the anchor that site and GitHub give it."""
    _, *found = re.split(r"^#+ (.*)$", prose(page), flags=re.M)
    anchors = [re.sub(r"[^\w\s-]", "", head).lower().replace(" ", "-") for head in found[::2]]
    return dict(zip(anchors, found[1::2], strict=True))


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Words, page and anchor of each link that stays in the docs."""
    found = re.findall(r"\[([^]]+)\]\((?!https:)([^)#]*)#?([^)]*)\)", prose(page))
    return [(words, page.parent / (file or page.name), anchor) for words, file, anchor in found]


def defined_in(file: Path) -> set[str]:
    """Functions and classes of a file; methods as Class.name."""
    found = set[str]()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {node.name}
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{it.name}" for it in inner if isinstance(it, ast.FunctionDef)}
    return found


def test_there_are_eight_chapters_each_with_its_file():
    assert len(CHAPTERS) == 8
    assert [*map(code_of, CHAPTERS)] == sorted((ROOT / "docs/code").glob("*.py"))
    front = {page for _, page, _ in links(ROOT / "docs/chapters/index.md")}
    assert front == {*CHAPTERS}


@pytest.mark.parametrize("page", CHAPTERS, ids=by_name)
def test_a_page_and_its_file_are_short_and_belong_together(page):
    assert len(code_of(page).read_text("utf-8").splitlines()) <= 61
    assert 500 <= len(prose(page).split()) <= 930
    assert ("python", f'--8<-- "code/{page.stem}.py"\n') in FENCE.findall(page.read_text("utf-8"))
    assert f"`python docs/code/{page.stem}.py`" in prose(page)


@pytest.mark.parametrize("page", CHAPTERS, ids=by_name)
def test_a_file_prints_what_its_page_quotes(page, capsys):
    """The last block of text in a page."""
    runpy.run_path(str(code_of(page)), run_name="__main__")
    quoted = [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == "text"]
    assert capsys.readouterr().out == quoted[-1]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_anchors_paths_and_names_exist(page):
    for _, other, anchor in links(page):
        assert other in PAGES
        assert not anchor or anchor in sections(other)
    found = re.findall(r"`((?:[\w.]+/)+[\w.]*)(?:::([\w.]+))?`", prose(page).replace("\n", " "))
    named = [(path, name) for path, name in found if not path.startswith("build/")]
    assert len(named) >= 2
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert not name or name in defined_in(ROOT / path), name


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_flags_exist(page):
    assert {*re.findall(r"`(--[\w-]+)", prose(page))} <= {*build_parser()._option_string_actions}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_one_click_from_the_front_page(question):
    [link] = [it for it in links(ROOT / "docs/chapters/index.md") if question in it[0]]
    _, page, anchor = link
    assert len(sections(page)[anchor].split()) >= 40


def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
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
