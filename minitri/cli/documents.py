"""Documents to ask about: text in any encoding, PDF and HTML, as plain text.

UTF-8 and byte order marks are tried first; a library guesses other encodings. PDF and HTML need the
packages of the extra `documents`.
"""

import codecs
import io
import logging
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from minitri import InputError
from minitri.cli.inputs import read_bytes
from minitri.errors import explain, shorten
from minitri.log import log

BLOCKS = ["p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "title", "blockquote", "pre"]
"""Elements of HTML that stand on lines of their own."""
MARKS = (  # that of UTF-32 begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_document(file: str, flag: str) -> str:
    """The text of the file of a flag, or of standard input (`-`). Raises `InputError`."""
    name = "standard input" if file == "-" else f"{flag} {shorten(file)}"
    if Path(file).is_dir():
        raise InputError(f"{name} is a folder; give the files in it")
    with explain(f"{name} cannot be read", "give text, PDF or HTML"):
        content = read_bytes(file)
        start = content[:512].lstrip().lower()
        if start.startswith(b"%pdf"):
            text, kind = _pdf(content), "PDF"
        elif start.startswith((b"<!doctype html", b"<html")) or file.lower().endswith(
            (".html", ".htm", ".xhtml")
        ):
            text, kind = _html(content), "HTML"
        else:
            text, kind = decode(content)
        if not text.strip():
            raise ValueError("it has no text" + " but perhaps pictures of it" * (kind == "PDF"))
    if kind != "utf-8":
        log.info("%s: read as %s", name, kind)
    return text


def decode(content: bytes) -> tuple[str, str]:
    """A text and its encoding. Raises `ValueError` if it is none."""
    encoding = next((name for mark, name in MARKS if content.startswith(mark)), "")
    try:
        text = content.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError:
        if encoding:
            raise
        text = "\0"
    if "\0" in text and not encoding:
        found = import_module("charset_normalizer").from_bytes(content)
        # The library prefers the Central European code page where both will do.
        western = [it for it in found if "cp1252" in it.could_be_from_charset]
        best = found.best()
        if best is None:
            raise ValueError("it is in no known encoding, or no text")
        encoding = "cp1252" if western else best.encoding
        text = content.decode(encoding)
    if re.search("[\0-\x08\x0e-\x1a]", text):
        raise ValueError("it has control characters, as no text has")
    return text, encoding or "utf-8"


def _pdf(content: bytes) -> str:
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it remarks on every small damage
    reader = _package("pypdf", "pypdf").PdfReader(io.BytesIO(content))
    return "\n".join(page.extract_text() for page in reader.pages)


def _html(content: bytes) -> str:
    page = _package("bs4", "beautifulsoup4").BeautifulSoup(content, "html.parser")
    for hidden in page(["script", "style", "template", "noscript"]):
        hidden.decompose()
    for block in page(BLOCKS):
        block.insert(0, "\n")  # before, too: many paragraphs are not closed
    for block in page([*BLOCKS, "br"]):
        block.append("\n")
    lines = (" ".join(line.split()) for line in page.get_text().splitlines())
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip()


def _package(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        advice = "install it: pip install 'minitri[documents]'"
        raise InputError(f"such a document needs the package {name}; {advice}") from None
