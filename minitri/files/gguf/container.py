"""Reader of the GGUF container: metadata, and tensors as they are stored, from a mapped file.

The reader of the `gguf` package makes an object of every value: for a vocabulary of 49,152 tokens
that takes 4 s, here 0.1 s, and for a damaged header it makes millions of objects."""

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape
from numpy import frombuffer, ndarray

from minitri.core.errors import shorten
from minitri.files.snapshots import times_of


class StoredTensor(NamedTuple):
    """A tensor as a GGUF file stores it: `data` (*rows, bytes of a row) is a view of the file."""

    type: GGMLQuantizationType  # number format
    shape: tuple[int, ...]  # of the numbers, not of the bytes
    data: ndarray
    pages: mmap.mmap | None = None  # the mapped file

    def release(self) -> None:
        """Frees the memory of all pages of the mapped file; a later access reads them again."""
        if self.pages and hasattr(mmap, "MADV_DONTNEED"):
            self.pages.madvise(mmap.MADV_DONTNEED)


def _numbers(pages: mmap.mmap, kind: str, count: int) -> ndarray:
    """View of a file's next `count` numbers of NumPy type `kind`. Raises `ValueError` for fewer."""
    view = frombuffer(pages, kind, count, pages.tell())
    pages.seek(view.nbytes, os.SEEK_CUR)
    return view


def _number(pages: mmap.mmap, kind: str = "u8") -> Any:
    """The next number of a file, or a tuple of them for several NumPy types such as "u4, u8"."""
    return _numbers(pages, kind, 1).item()


def _text(pages: mmap.mmap) -> str:
    """The next text in a file. Raises `ValueError` for one that the file's end cuts off."""
    (length,) = struct.unpack("<Q", pages.read(8))
    if len(text := pages.read(length)) < length:
        raise ValueError("it ends in the middle of a text")
    return text.decode()


def _value(pages: mmap.mmap) -> Any:
    """Reads a type and a value from a GGUF file: a number, a text, or an array or list of them."""
    kind = _kind(pages)
    if kind == "array":
        kind, count = _kind(pages), _number(pages)
        if kind != "string":
            return _numbers(pages, kind, count)
        return [_text(pages) for _ in range(count)]
    return _text(pages) if kind == "string" else _number(pages, kind)


def _kind(pages: mmap.mmap) -> str:
    """Reads the name of a type of values, such as string or array; for numbers it is NumPy's."""
    return GGUFValueType(_number(pages, "u4")).name.lower()


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], dict[Path, int]]:
    """Metadata and tensors, by name, of a GGUF file, or of all parts if it is one of several; and,
    in ns, when these files last changed. Raises `ValueError` and others for damaged files."""
    metadata, tensors = read_container(path)
    parts = []
    count = metadata.get("split.count", 1)
    for number in range(count, 0, -1) if count > 1 else ():
        end = f"-{number:05d}-of-{count:05d}.gguf"
        part = path.with_name(path.name[: -len(end)] + end)
        if not part.is_file():
            raise ValueError(f"it is one of {count} parts, and there is no {part.name}")
        metadata, stored = read_container(part)
        tensors |= stored
        parts.append(part)
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise ValueError("its parts are of different files")
    return metadata, tensors, times_of(parts or [path])


def read_container(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of one GGUF file, by their names. Raises many errors for damaged files.
    Each tensor has to begin where another ends, so wrong types or shapes are noticed."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if _number(pages, "u4") != GGUF_MAGIC or _number(pages, "u4") not in (2, 3):
        raise ValueError("it does not begin with GGUF and version 2 or 3")
    num_tensors, num_keys = _number(pages, "u8, u8")
    metadata = {_text(pages): _value(pages) for _ in range(num_keys)}
    table = [
        (_text(pages), _numbers(pages, "u8", _number(pages, "u4")), *_number(pages, "u4, u8"))
        for _ in range(num_tensors)
    ]
    alignment = metadata.get("general.alignment", 32)
    begin = end = pages.tell() + -pages.tell() % alignment
    tensors = {}
    for name, sizes, number, offset in table:
        kind = GGMLQuantizationType(number)
        shape = tuple(sizes[::-1].tolist())
        stored = quant_shape_to_byte_shape(shape, kind)
        if begin + offset != end:
            raise ValueError(f"{shorten(name, 60)} does not begin where a tensor ends")
        data = frombuffer(pages, "u1", math.prod(stored), end).reshape(stored)
        tensors[name] = StoredTensor(kind, shape, data, pages)
        end += data.nbytes + -data.nbytes % alignment
    if end < len(pages):
        raise ValueError("bytes are left after its last tensor")
    if len(metadata) + len(tensors) < num_keys + num_tensors:
        raise ValueError("it has a name twice")
    return metadata, tensors
