"""The paper by command: a study loses nothing, whenever it is stopped and whatever it is given; its
report is whole, and texts are found in the layouts in which data sets are published."""

import errno
import json
import os
import runpy
import signal
import sys
from functools import partial
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from minitri.core.errors import InputError
from tools.paper import __main__ as program
from tools.paper import report
from tools.paper.item import PUBLISHED, Item, Shown, Table
from tools.paper.items import ITEMS
from tools.paper.lab import Lab
from tools.paper.scale import SCALES
from tools.paper.study import Study
from tools.paper.texts import Text, load_texts

VOID = {"meta", "img", "link", "br"}


class Page(HTMLParser):
    """What is in a page; fails where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.tags = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def check_page(out: Path) -> Page:
    """Valid, with nothing from outside, for readers by eye and ear, by phone and at night."""
    text = (out / "report.html").read_text()
    page = Page(text)
    assert text.startswith("<!doctype html>\n<html lang")
    assert "color-scheme: light dark" in text
    assert any(it.get("name") == "viewport" for it in page.all("meta"))
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    assert all(it.get("scope") in {"col", "row"} for it in page.all("th"))
    for picture in page.all("img"):
        assert picture["alt"]
        assert (out / picture["src"]).read_bytes().startswith(b"\x89PNG")
    assert not page.all("script") + page.all("link")
    assert "http" not in text
    assert "url(" not in text
    return page


class Visits(list):
    """Cells that were measured, in order; `then` has what is done in the middle of the n-th."""

    def __init__(self):
        super().__init__()
        self.then = {}

    def measure(self, lab, settings):
        self.append((settings["what"], settings["n"]))
        self.then.pop(len(self), int)()
        return {"by": {0.5: [settings["n"] ** 2, 1 / 3]}}


@pytest.fixture
def visits(monkeypatch, tmp_path):
    """Two items that stand for all, in an empty folder."""
    visits = Visits()

    def cells(scale, what):
        return [{"what": what, "n": n} for n in range(3)]

    def show(done, scale):
        rows = [[str(it.settings["n"]), str(it.values["by"]["0.5"])] for it in done]
        table = Table(["n", "n < 3 & its square"], rows, "Exact.")
        return Shown([table], "It <holds>.", lambda axes: axes.plot([0, 1]))

    items = []
    for it in ("one", "two"):
        items.append(Item(it, partial(cells, what=it), visits.measure, show, 2, 3))
        monkeypatch.setitem(PUBLISHED, it, {"title": f"Figure {it}", "claim": "Up."})
    for module in (program, report):
        monkeypatch.setattr(module, "ITEMS", items)
    monkeypatch.chdir(tmp_path)
    return visits


@pytest.fixture
def undisturbed(visits, run, tmp_path, monkeypatch):
    """What is written by a study that nothing stops."""
    (tmp_path / "undisturbed").mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path / "undisturbed")
        assert run("all").code == 0
        visits.clear()
        return written()


@pytest.fixture
def run(call):
    """The program with tiny sizes."""
    return partial(call, program.main, "--scale", "tiny")


def written() -> dict[str, bytes]:
    """The pages and pictures of the study in this folder."""
    files = [it for it in Path("study").iterdir() if it.suffix in {".html", ".md", ".png"}]
    return {file.name: file.read_bytes() for file in files}


def cell_files() -> list[Path]:
    return sorted(Path("study").glob("cells/*/*.json"))


def interrupt():
    raise KeyboardInterrupt


def test_a_study_stopped_by_ctrl_c_twice_says_the_same(visits, undisturbed, run):
    """In the middle of a cell, which is measured again, as no other one is."""
    visits.then = {2: interrupt, 6: interrupt}
    for _ in range(2):
        stopped = run("all", "--quiet")
        assert (stopped.code, stopped.err) == (130, "minitri: interrupted\n")
    assert run("two", "one").code == 0
    one, two = ([(it, n) for n in range(3)] for it in ("one", "two"))
    assert visits == [*one[:2], *one[1:], *two[:2], *two[1:]]
    assert written() == undisturbed
    Path("study/one.png").unlink()
    assert run("two").code == 0
    assert len(visits) == 8
    assert written() == undisturbed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 4, 5, 8, 12])
def test_a_study_killed_at_any_moment_says_the_same(visits, undisturbed, run, number, when):
    """Around any file's being put in its place, by a signal that nothing can handle. Three pages
    are written first; cells of an item are followed by a picture and three pages."""
    replace, calls = Path.replace, []

    def fatal(*args):
        calls.append(args)
        if when == "after":
            replace(*args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "before":
            replace(*args)

    child = os.fork()
    if not child:
        Path.replace = fatal
        run("all")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    kept = len(cell_files())
    assert kept == sum(it < number + (when == "after") for it in (4, 5, 6, 11, 12, 13))
    assert run("all").code == 0
    assert len(visits) == 6 - kept
    assert written() == undisturbed


def test_a_full_disk_costs_no_cell_that_was_measured(visits, undisturbed, run, monkeypatch):
    write_bytes = Path.write_bytes

    def fills_up(path, content):
        if len(visits) == 3 and "cells" in path.parts:
            write_bytes(path, content[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, content)

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", fills_up)
        failed = run("all", "--quiet")
    assert failed.code == 2
    assert failed.err.count("\n") == 1
    assert "No space left on device" in failed.err
    assert len(cell_files()) == 2
    assert not [*Path("study").rglob("*.unfinished")]
    assert run("all").code == 0
    assert len(visits) == 3 + 4
    assert written() == undisturbed


def test_a_damaged_cell_is_measured_again_with_a_warning(visits, undisturbed, run):
    run("all")
    files = cell_files()
    files[0].write_text(files[0].read_text()[:90])
    files[1].write_text("[1, 2]")
    files[2].write_bytes(b"\xff\0")
    visits.clear()
    done = run("all", "--quiet")
    said = "".join(f"{file.name} is damaged: it is measured again\n" for file in files[:3])
    assert sorted(done.err.replace("study/cells/one/", "").splitlines()) == said.splitlines()
    assert visits == [("one", 0), ("one", 1), ("one", 2)]
    assert written() == undisturbed


def test_a_cell_of_another_commit_is_kept_and_named(visits, run):
    run("all")
    for file in cell_files()[:2]:
        cell = json.loads(file.read_text())
        cell["origin"]["commit"] = "0ld"
        file.write_text(json.dumps(cell))
    visits.clear()
    assert run("all").code == 0
    assert visits == []
    assert "0ld (2 cells)" in written()["report.md"].decode()
    assert run("two", "--again").code == 0
    assert visits == []
    assert "0ld (2 cells)" in written()["report.md"].decode()
    assert run("one", "--again").code == 0
    assert len(visits) == 2
    assert "0ld" not in written()["report.md"].decode()


def test_a_cell_that_only_another_commit_can_read_costs_its_item_alone(visits, run):
    run("all")
    [file, *_] = cell_files()
    cell = json.loads(file.read_text()) | {"values": {"of": "old"}}
    file.write_text(json.dumps(cell))
    with pytest.raises(KeyError):  # of this commit: a bug
        program.main(["all", "--scale", "tiny"])
    cell["origin"]["commit"] = "0ld"
    file.write_text(json.dumps(cell))
    assert run("all").code == 0
    page = written()["report.md"].decode()
    assert page.count("It <holds>.") == 1
    assert "--again measures them anew" in page


def test_cells_are_known_by_texts_model_and_scale(visits, run, tmp_path):
    """A text of the same name with other content is another text."""
    for content in ("a", "b"):
        (tmp_path / "it.txt").write_text(content)
        run("one", "--texts", "it.txt")
    run("one", "--texts", "it.txt", "--model", "other")
    assert len(visits) == len(cell_files()) == 9


def test_the_forecast_is_by_the_pace_of_this_machine(visits, run, tmp_path):
    """Two minutes each were usual, and far less with a tiny model."""
    one, two = program.ITEMS
    study = Study(tmp_path, Lab(SCALES["cpu"], [Text("a", "b")]))
    tiny = Study(tmp_path, Lab(SCALES["tiny"], study.lab.texts))
    assert 0 < tiny.seconds_left([one, two]) < 5
    assert study.seconds_left([one, two]) == 240
    study.measure(one, [one, two])
    files = [study.file(one, it) for it in one.cells(None)]
    for file in files:
        cell = json.loads(file.read_text())
        file.write_text(json.dumps(cell | {"seconds": 10.0}))
    assert Study(tmp_path, study.lab).seconds_left([one, two]) == pytest.approx(30)
    files[0].unlink()
    assert Study(tmp_path, study.lab).seconds_left([one, two]) == pytest.approx(160)
    lines = run("all").err.splitlines()
    assert "one, cell 1 of 3: what one, n 0; about 1 min left" in lines


def test_the_report_is_a_page_and_the_same_in_markdown(visits, undisturbed, run):
    visits.then = {5: interrupt, 6: interrupt}
    run("all", "--texts", __file__)
    run("all", "--texts", __file__)
    page = check_page(Path("study"))
    text = Path("study/report.html").read_text()
    markdown = Path("study/report.md").read_text()
    head = "Figure | Command | Time here | Time on a GPU"
    command = f"python -m tools.paper one --scale tiny --texts {__file__} --out study"
    assert markdown.splitlines()[4] == f"| {head} |"
    assert f"| Figure one | {command} | 0.0 min | 3 min |" in markdown
    assert "".join(f'<th scope="col">{it}</th>' for it in head.split(" | ")) in text
    assert text.index("<table") < text.index("<h2")
    assert len(page.all("img")) == 1
    for said in ("Up.", "It <holds>.", "n < 3 & its square", "Exact."):
        assert said in markdown
        assert escape(said) in text
    assert "| 0.0 min for 1 of 3 cells |" in markdown
    assert "not all is measured yet; the same command goes on." in markdown
    inputs = "Model: a tiny random one, which says nothing of the method. Texts: test_study."
    assert inputs in text
    assert inputs in markdown
    cells = json.loads(Path("study/report.json").read_text())["one"]
    assert [cell["values"]["by"]["0.5"][0] for cell in cells] == [0, 1, 4]
    assert {*cells[0]["origin"]} == {"commit", "machine", "torch", "command"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fig9"], "there is no item fig9; give all, one, two"),
        (["all", "--scale", "huge"], "invalid choice: 'huge'"),
        (["all", "--out", "file"], "--out file cannot be written (File exists); give a folder"),
        (["all", "--out", "file/in"], "--out file/in cannot be written (Not a directory)"),
        (["all", "--texts", "nowhere"], "--texts nowhere does not exist; give a folder or file"),
        (["all", "--texts", "empty"], "--texts empty holds no text; give a folder with *.txt"),
        (["all", "--texts", "latin"], "novel.txt cannot be read as .txt (UnicodeDecodeError"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(visits, run, words, said):
    Path("file").write_text("She had")
    Path("empty").mkdir()
    Path("empty/blank.txt").write_text("\n")
    Path("latin").mkdir()
    Path("latin/novel.txt").write_bytes("Café".encode("latin-1"))
    done = run(*words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert said in done.err
    assert visits == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_sizes_for_a_gpu_load_nothing_without_one(call, monkeypatch):
    monkeypatch.setattr(program, "load_texts", None)
    done = call(program.main, "all", "--scale", "gpu")
    assert done.code == 2
    assert "needs a CUDA device, and there is none; give --scale cpu" in done.err


def test_a_text_that_is_too_short_or_a_model_that_is_not_there_ends_it_in_a_line(run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("She had been")
    out = ("--quiet", "--out", tmp_path / "study")
    done = run("fig6b", "--texts", short, *out)
    assert done.code == 2
    assert done.err == (
        "minitri: the text short has 12 tokens, but 256 are needed; give longer --texts, more of "
        "them, or a smaller --scale\n"
    )
    done = run("fig6b", "--model", tmp_path / "nothing", *out)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "there is no file or folder" in done.err


def test_without_matplotlib_nothing_is_measured(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for name in ("report", "__main__"):
        monkeypatch.delitem(sys.modules, f"tools.paper.{name}")
    monkeypatch.setattr(sys, "argv", ["paper", "all", "--scale", "tiny"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tools.paper", run_name="__main__")
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "pip install" in said


def test_without_a_word_there_is_a_list(call):
    said = call(program.main).out.splitlines()
    assert said[0] == "| Figure | Command | Time here | Time on a GPU |"
    for item, line in zip(ITEMS, said[2:], strict=False):
        assert line.startswith(f"| {item.title} | python -m tools.paper {item.name} | ")


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_cells_are_json_and_each_is_measured_once(scale):
    """Else they would not be found again."""
    for item in ITEMS:
        cells = item.cells(scale)
        assert json.loads(json.dumps(cells)) == cells
        assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells) > 0


def test_every_item_is_whole(run, tmp_path, monkeypatch):
    """Every cell of every table is filled, every picture drawn; all is kept, and said again."""
    monkeypatch.chdir(tmp_path)
    assert run("all").code == 0
    before = written()
    page = check_page(Path("study"))
    sections = [attrs["id"] for attrs in page.all("h2")]
    assert sections == [item.name for item in ITEMS]
    assert len(page.all("img")) == sum(name.endswith(".png") for name in before)
    for item in ITEMS:
        assert item.claim in before["report.md"].decode()
    assert "not all is measured" not in before["report.md"].decode()
    for line in before["report.md"].decode().splitlines():
        if line.startswith("| "):
            assert "|  |" not in line.partition(" | ")[2]
    times = {file: file.stat().st_mtime_ns for file in cell_files()}
    assert run("all").code == 0
    assert times == {file: file.stat().st_mtime_ns for file in cell_files()}
    assert written() == before


def names(path: Path, most: int = 9) -> list[str]:
    return [text.name for text in load_texts(str(path), most)]


def write_files(folder: Path, **files: str) -> Path:
    """Files of these contents; __ stands for a folder, the last _ for the dot."""
    for name, content in files.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        file = folder / f"{stem}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


def test_pg19_is_read_as_published(tmp_path):
    """The books of the test set, in the order of their names."""
    files = {f"test__{number}_txt": f"Book {number}" for number in (30, 10, 20)}
    write_files(tmp_path, metadata_csv="10,Ten,1914,x\n", train__5_txt="Five", **files)
    assert names(tmp_path) == ["10", "20", "30"]
    assert names(tmp_path, 2) == ["10", "20"]


def test_narrative_qa_is_read_as_its_script_fetches_it(tmp_path):
    """Stories of the test set that could be fetched, in whatever encoding."""
    rows = "document_id,set\nb,test\na,train\nlost,test\nc,test\n"
    write_files(tmp_path, documents_csv=rows, tmp__a_content="A", tmp__b_content="B")
    (tmp_path / "tmp" / "c.content").write_bytes("Café".encode("latin-1"))
    assert load_texts(str(tmp_path), 9) == [Text("b", "B"), Text("c", "Caf\ufffd")]
    (tmp_path / "documents.csv").write_text("name\nb\n")
    with pytest.raises(InputError, match="documents.csv cannot be read .KeyError"):
        names(tmp_path)


def test_json_lines_have_a_text_each(tmp_path):
    rows = [{"input": "A\u2028B"}, {"id": 1, "context": "C"}, {"document": {"text": "D"}}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_files(tmp_path, it_jsonl=lines, an_txt="E")
    assert names(tmp_path) == ["an", "it", "it-1", "it-2"]
    contents = [text.content for text in load_texts(str(tmp_path / "it.jsonl"), 9)]
    assert contents == ["A\u2028B", "C", "D"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "A", ', "JSONDecodeError"),
        ("[1]", "AttributeError"),
        ('{"question": "who?", "title": 1}', "none of its columns question, title is text, input"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, line, said):
    write_files(tmp_path, good_jsonl='{"text": "A"}', it_jsonl=f'{{"text": "B"}}\n{line}')
    assert names(tmp_path, 2) == ["good", "it"]
    with pytest.raises(InputError, match="it.jsonl cannot be read") as raised:
        names(tmp_path)
    assert said in str(raised.value)
    assert "take it away" in str(raised.value)


def test_a_story_counts_once_however_many_questions_it_has(tmp_path):
    """As in NarrativeQA's parquet files; and a story that comes in another file, too."""
    arrow = pytest.importorskip("pyarrow", reason="pip install 'minitri[paper]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    stories = ["A"] * 20 + ["B"] * 3 + ["C"]
    rows = [{"document": {"id": it, "text": it}, "question": {"text": "?"}} for it in stories]
    (tmp_path / "data").mkdir()
    for name in ("test-0", "test-1"):
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")
    assert [it.content for it in load_texts(str(tmp_path), 9)] == ["A", "B", "C"]
    assert names(tmp_path) == ["test-0", "test-0-20", "test-0-23"]
    assert names(tmp_path, 2) == ["test-0", "test-0-20"]


def test_a_parquet_file_that_is_damaged_or_has_no_text_is_named(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pip install 'minitri[paper]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "it.parquet"
    parquet.write_table(arrow.table({"title": ["A"], "year": [1814]}), file)
    with pytest.raises(InputError, match="it.parquet .*none of its columns title, year is text"):
        names(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError, match="it.parquet cannot be read as .parquet") as raised:
        names(tmp_path)
    assert "\n" not in str(raised.value)


def test_without_pyarrow_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_files(tmp_path, it_parquet="PAR1")
    with pytest.raises(InputError, match=r"needs the package pyarrow .*minitri\[paper\]"):
        names(tmp_path)
