"""What documents a chat can read, and what it says of those that it cannot."""

import sys

import pytest

from minitri import InputError
from minitri.apps.cli.documents import read_document

FRENCH = "Il était une fois, à la lisière de la forêt, un garçon très naïf.\n"
RUSSIAN = "Жил-был у бабушки серенький козлик, и жил он хорошо.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FRENCH, "utf-8"),
        (RUSSIAN, "utf-8-sig"),
        (FRENCH, "latin-1"),
        ("It was a “dark” night.", "cp1252"),
        ("Größere Übung für Fräulein Müller.", "latin-1"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "utf-16"),
        (FRENCH, "utf-16-le"),
        (FRENCH, "utf-32"),
    ],
)
def test_a_text_is_read_in_its_encoding_and_others_than_utf_8_are_told(
    tmp_path, caplog, text, encoding
):
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode(encoding))
    with caplog.at_level("INFO", "minitri"):
        assert read_document(str(file), "--document") == text
    assert len(caplog.messages) == ("utf-8" not in encoding)


def test_few_damaged_bytes_do_not_change_the_encoding(tmp_path, caplog):
    file = tmp_path / "text.txt"
    file.write_bytes((FRENCH * 40).encode() + b"\xe9.")
    with caplog.at_level("INFO", "minitri"):
        assert read_document(str(file), "--document") == FRENCH * 40 + "\ufffd."
    assert "UTF-8 with 1 damaged character" in caplog.text


def pdf(text: str) -> bytes:
    drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    font = b"<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources%b>>" % font
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>", page]
    objects.append(b"<</Length %d>>stream\n%b\nendstream" % (len(drawn), drawn))
    body = b"".join(b"%d 0 obj%b endobj\n" % (n, it) for n, it in enumerate(objects, 1))
    return b"%PDF-1.4\n" + body + b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF"


def test_the_text_of_pdf_and_html_is_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(pdf("It was a dark night."))
    assert read_document(str(file), "--document") == "It was a dark night."
    page = "<!DOCTYPE html><style>p {}</style><h1>Ré &amp; Mi</h1><p>It <b>was</b>\ndark.<p>End."
    file.write_text(page, encoding="utf-8")
    assert read_document(str(file), "--document") == "Ré & Mi\n\nIt was\ndark.\nEnd."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\2\1\1" + bytes(range(256)) * 9, "--document FILE .*; give text, or PDF or HTML"),
        (b"a\0b", "control characters|no text"),
        (b"\xff\xfe\0", "no known encoding|UnicodeDecodeError"),
        (b"%PDF-1.4\nbroken", "--document FILE cannot be read"),
        (pdf("")[:-9], "--document FILE cannot be read"),
        (b" \n", "it has no text"),
    ],
)
def test_what_has_no_text_is_named_in_one_line(tmp_path, content, message):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message.replace("FILE", str(file))) as raised:
        read_document(str(file), "--document")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("module", "content"), [("pypdf", pdf("x")), ("bs4", b"<html>x")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, module, content):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=rf"{module}.*'minitri\[documents\]'"):
        read_document(str(tmp_path / "file"), "--document")
