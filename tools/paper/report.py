"""What a study says: Markdown, a picture and JSON for each item, and one HTML page of all."""

import html
import io
import json
from collections import Counter

from tools.paper.item import Item, Json, Shown
from tools.paper.items import ITEMS
from tools.paper.study import Study, write

PICTURE = (6.4, 3.6)
"""Inches."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #8884; padding: .2rem .8rem .2rem 0; text-align: left }
figure { margin: 1rem 0 } img { max-width: 100%; background: #fff } .from { color: #777 }
:root { color-scheme: light dark }
"""


def write_item(study: Study, item: Item) -> None:
    """Writes what the cells of an item say, as far as there are any. Raises `OSError`."""
    done = study.done(item)
    if not done:
        return
    shown = item.show(done, study.lab.scale)
    picture = draw(item, shown)
    if picture is not None:
        write(study.out / f"{item.name}.png", picture)
    write(study.out / f"{item.name}.md", markdown(study, item, shown))
    cells = [{"settings": it.settings, "values": it.values} for it in done]
    content: Json = {"item": item.name, "scale": study.lab.identity, "verdict": shown.verdict}
    content |= {"cells": cells, "measured": study.origins(item)}
    write(study.out / f"{item.name}.json", json.dumps(content, indent=1) + "\n")


def draw(item: Item, shown: Shown) -> bytes | None:
    """The picture as PNG; None where the item has none, or matplotlib is missing."""
    if shown.draw is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=PICTURE, layout="constrained")
    axes = figure.subplots()
    shown.draw(axes)
    axes.set_title(item.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, dpi=120, metadata={"Software": None})
    return data.getvalue()


def origin(study: Study, item: Item) -> str:
    """Where the numbers come from, in a line: commits and machines, with the cells of each."""
    origins = study.origins(item)
    seconds = sum(it["seconds"] for it in origins)
    total = len(item.cells(study.lab.scale))
    parts = [f"{len(origins)} of {total} cells, {seconds / 60:.1f} min"]
    for name in ("commit", "machine"):
        counts = Counter(it[name] for it in origins)
        names = (f"{it} ({num} cells)" if len(counts) > 1 else it for it, num in counts.items())
        parts.append(f"{name} {', '.join(names)}")
    return "; ".join(parts)


def markdown(study: Study, item: Item, shown: Shown) -> str:
    """An item as Markdown."""
    parts = [f"# {item.title}", f"The paper: {item.claim}", f"Here: {shown.verdict}"]
    if shown.draw is not None:
        parts.append(f"![{item.title}]({item.name}.png)")
    parts += [table.markdown() for table in shown.tables]
    parts.append(f"`python -m tools.paper {item.name}`; {origin(study, item)}.\n")
    return "\n\n".join(parts)


def write_report(study: Study, listing: str) -> None:
    """Writes the page of all items that have cells. Raises `OSError`."""
    parts = ["<h1>The paper by command</h1>", as_html(listing)]
    for item in ITEMS:
        if done := study.done(item):
            parts.append(section(study, item, item.show(done, study.lab.scale)))
    head = "<!doctype html><meta charset=utf-8><title>The paper by command</title>"
    head += f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    write(study.out / "report.html", head + "\n".join(parts))


def section(study: Study, item: Item, shown: Shown) -> str:
    """An item on the page: the paper's claim, ours, the picture and the tables."""
    predicted = " <b>Predicted, not measured.</b>" if shown.is_predicted else ""
    parts = [f"<h2 id={item.name}>{html.escape(item.title)}</h2>"]
    parts.append(f"<p>The paper: {html.escape(item.claim)}</p>")
    parts.append(f"<p>Here: {html.escape(shown.verdict)}{predicted}</p>")
    if shown.draw is not None:
        alt = html.escape(item.title, quote=True)
        parts.append(f"<figure><img src='{item.name}.png' alt='{alt}'></figure>")
    parts += [as_html(table.markdown()) for table in shown.tables]
    line = html.escape(f"python -m tools.paper {item.name}; {origin(study, item)}")
    parts.append(f"<p class=from>{line}</p>")
    return "\n".join(parts)


def as_html(table: str) -> str:
    """A Markdown table, and the note below it, as HTML."""
    lines = table.strip().splitlines()
    rows: list[str] = []
    for line in (it for it in lines if it.startswith("|") and not it.startswith("| ---")):
        kind = "td" if rows else "th"
        cells = (html.escape(cell.strip()) for cell in line.strip("|").split("|"))
        rows.append("<tr>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>")
    notes = [f"<p>{html.escape(it)}</p>" for it in lines if it and not it.startswith("|")]
    return f"<table>{''.join(rows)}</table>{''.join(notes)}"
