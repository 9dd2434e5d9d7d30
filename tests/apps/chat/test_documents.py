"""Documents that a chat can read, and the error for those that it cannot."""

import pytest

from minitri.apps.cli.documents import read_document
from tests.conftest import refused

FRENCH = "Il était une fois, à la lisière de la forêt, un garçon très naïf.\n"
RUSSIAN = "Жил-был у бабушки серенький козлик, и жил он хорошо.\n"
NO_TEXT = [b"\x7fELF\2\1\1" + bytes(range(256)) * 9, b"a\0b", b"\xff\xfe\0", b"%PDF-1.4\nx", b" \n"]


@pytest.fixture
def read(tmp_path):
    def read(content: bytes) -> str:
        (tmp_path / "file").write_bytes(content)
        return read_document(str(tmp_path / "file"), "--document")

    return read


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(RUSSIAN, "utf-8-sig"), (FRENCH, "latin-1"), (RUSSIAN, "koi8-r"), (FRENCH, "utf-16-le")],
)
def test_a_text_is_read_in_its_encoding_and_others_than_utf_8_are_logged(
    read, caplog, text, encoding
):
    with caplog.at_level("INFO", "minitri"):
        assert read(text.encode(encoding)) == text
    assert len(caplog.messages) == ("utf-8" not in encoding)


def test_few_damaged_bytes_do_not_change_the_encoding(read, caplog):
    with caplog.at_level("INFO", "minitri"):
        assert read((FRENCH * 40).encode() + b"\xe9.") == FRENCH * 40 + "\ufffd."
    assert "UTF-8 with 1 damaged character" in caplog.text


def pdf(text: str) -> bytes:
    drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    font = b"<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources%b>>" % font
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>", page]
    objects.append(b"<</Length %d>>stream\n%b\nendstream" % (len(drawn), drawn))
    body = b"".join(b"%d 0 obj%b endobj\n" % (n, part) for n, part in enumerate(objects, 1))
    return b"%PDF-1.4\n" + body + b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF"


def test_the_text_of_pdf_and_html_is_read(read):
    assert read(pdf("It was a dark night.")) == "It was a dark night."
    page = "<!DOCTYPE html><style>p {}</style><h1>Ré &amp; Mi</h1><p>It <b>was</b>\ndark.<p>End."
    assert read(page.encode()) == "Ré & Mi\n\nIt was\ndark.\nEnd."
    for encoding in ("latin-1", "utf-16-le"):
        assert read(f"<html><p>{FRENCH}".encode(encoding)) == FRENCH.strip()


@pytest.mark.parametrize("content", NO_TEXT)
def test_content_without_a_text_is_refused_in_one_line(read, content):
    with refused("--document /", " cannot be read (", "; give text"):
        read(content)
