"""Reads the files that flags name as plain text: in any encoding, or PDF and HTML (an extra)."""

import base64
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.devices.parallel.ranks import join
from minitri.text.sandbox import Sandbox

MAX_BYTES = 16 << 20  # 4 million tokens of English; some files have no end
SANDBOX = Sandbox("minitri.apps.cli.documents", 10, 1 << 30, max_idle=0)  # 10 s and 1 GiB
HTML = re.compile("<html|<!doctype html")
BLOCK = re.compile("^(p|div|li|t[rdh]|d[td]|option|br|title|blockquote|pre|h[1-6])$")
WANTED = "text, or PDF or HTML"
WANTED += "" if find_spec("bs4") else " with: pip install 'minitri[documents]'"


def read_document(file: str, flag: str) -> str:
    """The text of the file that a flag names, or of standard input (`-`). Raises `InputError`."""
    text, encoding = read_file(file, flag, WANTED, _text_of)
    if encoding:
        log.info(f"{shorten(file)}: read as {encoding}")
    return text


def read_apart(content: bytes) -> tuple[str, str]:
    """Text and encoding of a stranger's file, read within limits. Raises `InputError`."""
    with explain("the file cannot be read", f"give {WANTED}"):
        read: Any = SANDBOX.ask(base64.b64encode(content).decode())
    text, encoding = read
    return text, encoding


def answer(question: str) -> tuple[str, str]:
    """Text and encoding of `question`, a file in base64; called in the process of a sandbox."""
    os.nice(19)
    return _text_of(base64.b64decode(question))


def _text_of(content: bytes) -> tuple[str, str]:
    """Text of a file, and its encoding, PDF, HTML, or "" for UTF-8. Raises `ValueError`."""
    head = content[:1024].lower()
    has_charset = b"charset" in head and HTML.search(head.decode("latin-1"))
    if content.startswith(b"%PDF"):
        pypdf = import_module("pypdf")
        logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of every small damage
        text = "\n".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages)
        encoding = "PDF"
    else:
        text, encoding = ("", "") if has_charset else _decoded(content)
        if has_charset or HTML.search(text[:1024].lower()):
            page = import_module("bs4").BeautifulSoup(text or content, "html.parser")
            for block in page(BLOCK):
                block.insert_before("\n")  # before, too: many paragraphs are not closed
                block.insert_after("\n")
            text = re.sub(r"\n\s*\n", "\n\n", page.get_text()).strip()
            encoding = "HTML"
    if not text.strip():
        raise ValueError("it has no text")
    return text, encoding


def _decoded(content: bytes) -> tuple[str, str]:
    """Text of a file, and its encoding, or "" for UTF-8. Raises `ValueError`."""
    text = content.decode("utf-8-sig", errors="replace")
    num_damaged = text.count("\ufffd")
    encoding = f"UTF-8 with {num_damaged} damaged characters" if num_damaged else ""
    if "\0" in text or num_damaged > len(text) // 1000:
        guesses = import_module("charset_normalizer").from_bytes(content)
        if not guesses:
            raise ValueError("it is in no known encoding, or no text")
        # The library prefers the Central European code page where both will do.
        is_western = any("cp1252" in guess.could_be_from_charset for guess in guesses)
        encoding = "cp1252" if is_western else guesses.best().encoding
        text = content.decode(encoding)
    if re.search("[\0-\x08\x0e-\x1a]", text):
        raise ValueError("it has control characters, as no text has")
    return text, encoding


def read_text(file: str, flag: str) -> str:
    """Text of a UTF-8 file that a flag names, or of standard input (`-`). Raises `InputError`."""
    wanted = "a file of UTF-8 text"
    return join().ask_first(lambda: read_file(file, flag, wanted, lambda b: b.decode("utf-8-sig")))


def read_file(file: str, flag: str, wanted: str, decode: Callable[[bytes], Any]) -> Any:
    """Reads the file that a flag names, or standard input (`-`); returns what `decode` makes of its
    bytes. Raises `InputError`, which advises to give what is `wanted`."""
    name = "standard input" if file == "-" else f"{flag} {shorten(file)}"
    with explain(f"{name} cannot be read", f"give {wanted}"):
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1) or b""  # None where nothing waits
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MB")
        if not content:
            raise ValueError("it is empty")
        return decode(content)
