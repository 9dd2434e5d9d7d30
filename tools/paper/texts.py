"""Long texts to measure on: folders and files in the layouts in which data sets are published.

    PG-19          a folder with metadata.csv and test/*.txt (or *.txt)
    NarrativeQA    a folder with documents.csv and tmp/*.content, or the parquet files of the hub
    any other      a folder of *.txt, *.parquet, *.jsonl; or one such file; or none: Python's help

Of tables the texts are in a column `text`, `input`, `context` or `document` (there `text`).
"""

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from minitri.cli.inputs import demo_text
from minitri.errors import InputError, explain, shorten

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
    where = Path(path)
    if not where.exists():
        raise InputError(f"--texts {shorten(path)} does not exist; give a folder or file of texts")
    texts = list(islice(_texts(where), most))
    if not texts:
        kinds = ", ".join(KINDS)
        raise InputError(f"--texts {shorten(path)} holds no text; give a folder with {kinds}")
    return texts


def _texts(where: Path) -> Iterator[Text]:
    if where.is_file():
        yield from _in_file(where)
    elif (where / "documents.csv").is_file():
        yield from _narrative(where)
    else:
        folder = where / "test" if (where / "test").is_dir() else where
        for file in sorted(file for kind in KINDS for file in folder.glob(kind)):
            yield from _in_file(file)


def _narrative(where: Path) -> Iterator[Text]:
    """The test set's stories, as the scripts of NarrativeQA fetch them."""
    with explain(f"{where / 'documents.csv'} cannot be read"):
        with (where / "documents.csv").open(encoding="utf-8", newline="") as file:
            names = [row["document_id"] for row in csv.DictReader(file) if row["set"] == "test"]
    for name in names:
        story = where / "tmp" / f"{name}.content"
        if story.is_file():  # some sources do not answer any more
            yield Text(name, story.read_text(encoding="utf-8", errors="replace"))


def _in_file(file: Path) -> Iterator[Text]:
    with explain(f"{file} cannot be read as {file.suffix}", "get it again, or take it away"):
        if file.suffix == ".parquet":
            rows = _parquet(file)
        elif file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            rows = (json.loads(line) for line in lines if line.strip())
        else:
            rows = iter([{"text": file.read_text(encoding="utf-8", errors="replace")}])
        for number, row in enumerate(rows):
            yield Text(f"{file.stem}-{number}" if number else file.stem, _content(row))


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with pyarrow.parquet.ParquetFile(file) as table:
        wanted = [name for name in table.schema_arrow.names if name in COLUMNS]
        for batch in table.iter_batches(8, columns=wanted):  # books are large
            yield from batch.to_pylist()


def _content(row: dict[str, Any]) -> str:
    for name in COLUMNS:
        value = row.get(name)
        if isinstance(value, dict):
            value = value.get("text")
        if isinstance(value, str):
            return value
    raise ValueError(f"none of its columns {', '.join(row)} is {', '.join(COLUMNS)}")
