"""Long texts to measure on: folders and files in the layouts in which data sets are published.

    PG-19          a folder with metadata.csv and test/*.txt
    NarrativeQA    a folder with documents.csv and tmp/*.content, or with the hub's data/*.parquet
    any other      a folder of *.txt, *.parquet, *.jsonl; or one such file; or none: Python's help

Of tables the texts are in a column `text`, `input`, `context` or `document` (there `text`). A text
that comes again, as a story with each of its questions, counts once.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minitri.apps.cli.inputs import demo_text
from minitri.core.errors import InputError, explain, shorten

COLUMNS = ("text", "input", "context", "document")
KINDS = ("*.txt", "*.parquet", "*.jsonl")


class Text(NamedTuple):
    """A text and where it comes from."""

    name: str
    content: str


def load_texts(path: str | None, most: int) -> list[Text]:
    """At most `most` texts of a folder or file, in the order of their names. Raises `InputError`,
    also where one of the files is damaged."""
    if path is None:
        return [Text("pydoc", demo_text())]
    if not Path(path).exists():
        raise InputError(f"--texts {shorten(path)} does not exist; give a folder or file of texts")
    found = dict[str, Text]()
    for text in _texts(Path(path)):
        if text.content.strip():
            found.setdefault(text.content, text)
        if len(found) == most:
            break
    if not found:
        kinds = ", ".join(KINDS)
        raise InputError(f"--texts {shorten(path)} holds no text; give a folder with {kinds}")
    return [*found.values()]


def _texts(where: Path) -> Iterator[Text]:
    files = [where]
    if (where / "documents.csv").is_file():
        files = _stories(where)
    elif where.is_dir():
        folders = (where / "test", where, where / "data")
        found = (sorted(it for kind in KINDS for it in folder.glob(kind)) for folder in folders)
        files = next(filter(None, found), [])
    for file in files:
        with explain(f"{file} cannot be read as {file.suffix}", "get it again, or take it away"):
            for number, row in enumerate(_rows(file)):
                yield Text(f"{file.stem}-{number}" if number else file.stem, _content(row))


def _stories(where: Path) -> list[Path]:
    """Texts of NarrativeQA's test set, as its script fetches them; some sources do not answer any
    more."""
    with explain(f"{where / 'documents.csv'} cannot be read"):
        with (where / "documents.csv").open(encoding="utf-8", newline="") as file:
            names = [row["document_id"] for row in csv.DictReader(file) if row["set"] == "test"]
    stories = (where / "tmp" / f"{name}.content" for name in names)
    return [story for story in stories if story.is_file()]


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        with explain(f"{file} needs the package pyarrow", "run: pip install 'minitri[paper]'"):
            import pyarrow.parquet
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            wanted = [name for name in names if name in COLUMNS]
            for batch in table.iter_batches(8, columns=wanted or names):  # books are large
                yield from batch.to_pylist()
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, filter(str.strip, lines))
    else:  # NarrativeQA's stories are in whatever encoding their sources had
        errors = "replace" if file.suffix == ".content" else "strict"
        yield {"text": file.read_text(encoding="utf-8-sig", errors=errors)}


def _content(row: Any) -> str:
    for name in COLUMNS:
        value = row.get(name)
        if isinstance(value, dict):
            value = value.get("text")
        if isinstance(value, str):
            return value
    raise ValueError(f"none of its columns {', '.join(row)} is {', '.join(COLUMNS)}")
