"""The paper by command: a study loses nothing, whenever it is stopped and whatever it is given; its
report is whole, and texts are found in the layouts in which data sets are published."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tools.paper import __main__ as program
from tools.paper import report
from tools.paper.item import PUBLISHED, Item, Shown, Table
from tools.paper.items import ITEMS
from tools.paper.scale import SCALES
from tools.paper.texts import Text, load_texts


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


@pytest.fixture
def undisturbed(visits, run, tmp_path, monkeypatch):
    """Pages and pictures of a study that nothing stops."""
    (tmp_path / "undisturbed").mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path / "undisturbed")
        assert run("all").code == 0
        visits.clear()
        return written()


def written() -> dict[str, bytes]:
    """The pages and pictures of the study in this folder."""
    files = [file for file in Path("study").iterdir() if file.suffix in {".html", ".md", ".png"}]
    return {file.name: file.read_bytes() for file in files}


def cell_files() -> list[Path]:
    return sorted(Path("study").glob("cells/*/*.json"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [4, 5, 8])
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
    num_kept = len(cell_files())
    assert num_kept == sum(n < number + (when == "after") for n in (4, 5, 6, 11, 12, 13))
    assert run("all").code == 0
    assert len(visits) == 6 - num_kept
    assert written() == undisturbed


def test_a_damaged_cell_is_measured_again_with_a_warning(visits, undisturbed, run):
    run("all")
    for file, content in zip(cell_files(), (b"{", b"[1, 2]", b"\xff\0"), strict=False):
        file.write_bytes(content)
    visits.clear()
    done = run("all", "--quiet")
    assert done.err.count(" is damaged: it is measured again\n") == 3
    assert visits == [("one", 0), ("one", 1), ("one", 2)]
    assert written() == undisturbed


def test_a_cell_of_another_commit_is_kept_and_named(visits, run):
    run("all")
    for file in cell_files()[:2]:
        cell = json.loads(file.read_text())
        cell["origin"]["commit"] = "0ld"
        file.write_text(json.dumps(cell))
    visits.clear()
    for words, num_measured in ((["all"], 0), (["two", "--again"], 0), (["one", "--again"], 2)):
        assert run(*words).code == 0
        assert len(visits) == num_measured
        assert ("0ld (2 cells)" in written()["report.md"].decode()) == (num_measured == 0)


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
    """Every cell of every table is filled, every picture drawn; all is kept, and said again."""
    monkeypatch.chdir(tmp_path)
    assert run("all").code == 0
    before = written()
    page, html = before["report.md"].decode(), before["report.html"].decode()
    assert "not all is measured" not in page
    assert all(item.claim in page for item in ITEMS)
    assert html.count("<img") == sum(name.endswith(".png") for name in before)
    rows = [line.partition(" | ")[2] for line in page.splitlines() if line.startswith("| ")]
    assert not any("|  |" in row for row in rows)
    times = {file: file.stat().st_mtime_ns for file in cell_files()}
    assert run("all").code == 0
    assert times == {file: file.stat().st_mtime_ns for file in cell_files()}
    assert written() == before


@pytest.mark.parametrize(
    ("files", "texts"),
    [
        (
            {
                "metadata.csv": "10,Ten\n",
                "train/5.txt": "V",
                "test/9.txt": "IX",
                "test/30.txt": "X",
            },
            [Text("30", "X"), Text("9", "IX")],
        ),
        (
            {"documents.csv": "document_id,set\nb,test\na,train\nc,test\n", "tmp/b.content": "B"},
            [Text("b", "B")],
        ),
        (
            {"b.jsonl": '{"input": "A\u2028B"}\n\n{"document": {"text": "C"}}', "a.txt": "C"},
            [Text("a", "C"), Text("b", "A\u2028B")],
        ),
    ],
    ids=["PG-19", "NarrativeQA", "JSON lines"],
)
def test_texts_are_found_as_published_and_each_counts_once(tmp_path, files, texts):
    """Of the test set, in the order of their names."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert load_texts(str(tmp_path), 9) == texts
    assert load_texts(str(tmp_path), 1) == texts[:1]
