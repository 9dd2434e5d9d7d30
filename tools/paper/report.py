"""Report of a study: a page as HTML and as Markdown, with a picture of each item, and JSON."""

import io
import json
from collections import Counter
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from matplotlib.figure import Figure

from minitri.core.errors import shorten
from tools.paper.item import Item, Shown, Table
from tools.paper.items import ITEMS
from tools.paper.study import Study, write

PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(),
    trim_blocks=True,
)


def overview(study: Study | None = None) -> Table:
    """List of all items, with the command and the time of each, measured here or elsewhere."""
    rows = []
    for item in ITEMS:
        command = study.command(item) if study else f"python -m tools.paper {item.name}"
        here = progress(study, item) if study else f"{item.minutes_here:g} min"
        rows.append([item.title, command, here, f"{item.minutes_gpu:g} min"])
    here = "as measured" if study else "--scale cpu on 2 cores of an EPYC"
    note = f"Here: {here}. On a GPU: 7B after 122,880 tokens on an H200, predicted."
    return Table(("Figure", "Command", "Time here", "Time on a GPU"), rows, note)


def progress(study: Study, item: Item) -> str:
    """How many cells of an item were measured, and how long that took."""
    cells, done = study.cells(item), study.done(item)
    minutes = f"{sum(cell.seconds for cell in done) / 60:.1f} min"
    return minutes + f" for {len(done)} of {len(cells)} cells" * (len(done) < len(cells))


def write_report(study: Study, latest: Item | None = None) -> None:
    """Writes what is known of all items, with a new picture of the `latest`, and of those that have
    none. Raises `OSError`."""
    lab = study.lab
    model = lab.model or lab.scale.model or "a tiny random one, which says nothing of the method"
    inputs = f"Model: {model}. Texts: {shorten(', '.join(it.name for it in lab.texts))}."
    items = [item for item in ITEMS if study.done(item)]
    sections = [(item, origin(study, item), *verdict(study, item)) for item in items]
    for item, _, _, shown in sections:
        picture = study.out / f"{item.name}.png"
        if shown and (item is latest or not picture.exists()):
            write(picture, draw(item.title, shown))
    for name in ("report.html", "report.md"):
        page = PAGES.get_template(name)
        text = page.render(inputs=inputs, overview=overview(study), sections=sections)
        write(study.out / name, text + "\n")
    content = {item.name: [*map(vars, study.done(item))] for item in items}
    write(study.out / "report.json", json.dumps(content, indent=1) + "\n")


def origin(study: Study, item: Item) -> str:
    """Where the numbers come from, in a line."""
    parts = [progress(study, item)]
    for name in ("commit", "machine", "command"):
        counts = Counter(cell.origin[name] for cell in study.done(item))
        names = (f"{it} ({num} cells)" if len(counts) > 1 else it for it, num in counts.items())
        parts.append(f"{name} {', '.join(names)}")
    return "; ".join(parts)


def verdict(study: Study, item: Item) -> tuple[str, Shown | None]:
    """Table and picture of an item; nothing before its last cell is measured."""
    cells = study.done(item)
    if len(cells) < len(study.cells(item)):
        return "not all is measured yet; the same command goes on.", None
    try:
        shown = item.show(cells, study.lab.scale)
    except Exception:
        if all(cell.origin["commit"] == study.commit for cell in cells):
            raise
        return "these cells of another commit cannot be read; --again measures them anew.", None
    return shown.verdict, shown


def draw(title: str, shown: Shown) -> bytes:
    """The picture as PNG."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    shown.draw(axes)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, dpi=120, metadata={"Software": None})
    return data.getvalue()
