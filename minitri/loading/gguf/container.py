"""The container format of GGUF: metadata and tensors as they are stored, from a mapped file.

The `gguf` package has a parser, too. It makes objects of every value, which takes 1.8 s for a
vocabulary of 49,152 tokens where this one takes 0.1 s, and millions of them for a damaged header.
So whatever a file counts is compared with its size before anything is made of it.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from minitri.errors import shorten

_NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _ARRAY = 8, 9
_MOST_ENTRIES, _MOST_TEXTS = 1 << 16, 1 << 22
"""Keys or tensors of a file, and texts of an array: far more than any model has."""


class StoredTensor(NamedTuple):
    """A tensor as it is stored: `data` is a view of the mapped file, (*rows, bytes of a row)."""

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


class _Reader:
    """The values of a GGUF file, one after the other. Raises `ValueError` where the file ends."""

    def __init__(self, path: Path) -> None:
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)  # whose views are fast
        self.position = 0

    def numbers(self, kind: str, count: int) -> np.ndarray:
        """A view of the file."""
        start = self.position
        self.position += np.dtype(kind).itemsize * count
        if self.position > len(self.data):
            raise ValueError(f"{self.position} bytes are needed, {len(self.data)} are there")
        return self.data[start : self.position].view(kind)

    def number(self, kind: str = "<u8", most: int | None = None) -> Any:
        value = self.numbers(kind, 1).item()
        if most is not None and value > most:
            raise ValueError(f"it counts {value} things where at most {most} can be")
        return value

    def text(self) -> str:
        return self.numbers("u1", self.number()).tobytes().decode()

    def value(self, kind: int, is_element: bool = False) -> Any:
        """A number, a text, a list of texts, or an array of numbers."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY and not is_element:
            element = self.number("<u4")
            if element == _TEXT:
                return [self.text() for _ in range(self.number(most=_MOST_TEXTS))]
            return self.numbers(_NUMBERS[element], self.number())
        return self.number(_NUMBERS[kind])

    def metadata(self, num_keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            if key in found:
                raise ValueError(f"it has {shorten(key, 60)} twice")
            found[key] = self.value(self.number("<u4"))
        return found

    def tensors(self, num_tensors: int, alignment: int) -> dict[str, StoredTensor]:
        """Each begins where the one before it ends; so none can be of another type or shape."""
        table = []
        for _ in range(num_tensors):
            name = self.text()
            num_dims = self.number("<u4", most=4)
            *rows, row = reversed(self.numbers("<u8", num_dims).tolist())
            table.append((name, rows, row, self.number("<u4"), self.number()))
        end = 0
        begin = -(-self.position // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, rows, row, number, offset in table:
            kind = gguf.GGMLQuantizationType(number)
            block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            if offset != end or row % block or name in found:
                what = f"tensor {shorten(name, 60)} of type {kind.name} and shape {(*rows, row)}"
                raise ValueError(f"{what} does not fit between its neighbours")
            row_bytes = row // block * num_bytes
            self.position = begin + offset
            data = self.numbers("u1", math.prod(rows) * row_bytes).reshape(*rows, row_bytes)
            found[name] = StoredTensor(kind, (*rows, row), data)
            end = -(-(self.position - begin) // alignment) * alignment
        if len(self.data) > begin + end:
            raise ValueError("bytes are left after its last tensor")
        return found


def read_container(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors by their names. Raises `ValueError` and others for a damaged file."""
    reader = _Reader(path)
    if reader.number("<u4") != gguf.GGUF_MAGIC or reader.number("<u4") not in (2, 3):
        raise ValueError("it does not begin with GGUF and version 2 or 3")
    num_tensors = reader.number(most=_MOST_ENTRIES)
    metadata = reader.metadata(reader.number(most=_MOST_ENTRIES))
    return metadata, reader.tensors(num_tensors, metadata.get("general.alignment", 32))
