"""KV snapshots: K and V of a text in a file, so that a later run need not read the text again.

A snapshot is a safetensors file with `tokens`, `kv` (L, 2, K, T, D) and a checksum of both and of
the header, which has a manifest: weights, config, dtype and RoPE. The file is written under another
name in the same folder and renamed when it is complete and on the disk, so a reader never sees half
a file. Only the file's owner can read it. It replaces nothing but another snapshot.
Legend: L layers, B = 1 row, T tokens, K KV heads, D head dim."""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from io import BufferedReader
from itertools import chain
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.errors import InputError, explain, shorten
from minitri.core.model.llama import Llama

FORMAT = "minitri KV snapshot 4"
START = b'{"__metadata__": {"format": "minitri'  # first bytes after the header's length
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def manifest_of(model: Llama) -> dict[str, str]:
    """Facts on which K and V of a model's texts depend, which the reader of a snapshot compares.
    Raises `InputError` for a model that is split over processes, or was not read from files."""
    config = model.config
    if model.execution.ranks.count > 1 or not (fingerprint := model.execution.identify()):
        raise InputError(
            f"the KV cache of {config.name} is neither saved nor loaded: it was not read "
            "from a file, or is divided among processes; use a model of a file in one process"
        )
    # K and V do not depend on name, context length and end-of-sequence tokens.
    shape = replace(config, name="", context_length=1, eos_token_ids=())
    return {
        "format": FORMAT,
        "weights": fingerprint,
        "dtype": DTYPES[model.dtype],
        "rope": config.rope.describe(),
        "config": sha256(repr(shape).encode()).hexdigest(),
    }


def header_of(model: Llama, num_tokens: int, note: str) -> bytes:
    """The header of a snapshot of `num_tokens` tokens: manifest, note, and the tensors' places."""
    config = model.config
    kv = [config.num_layers, 2, config.num_kv_heads, num_tokens, config.head_dim]
    start = 4 * num_tokens
    end = start + num_tokens * config.kv_values_per_token * model.dtype.itemsize
    content = {
        "__metadata__": manifest_of(model) | {"note": note},
        "tokens": {"dtype": "I32", "shape": [num_tokens], "data_offsets": [0, start]},
        "kv": {"dtype": DTYPES[model.dtype], "shape": kv, "data_offsets": [start, end]},
        "checksum": {"dtype": "I64", "shape": [1], "data_offsets": [end, end + 8]},
    }
    text = json.dumps(content).encode()
    return text + b" " * (-len(text) % 8)


def read_snapshot(path: Path, model: Llama) -> tuple[HeldRow, str]:
    """Reads a file that `write_snapshot` wrote; returns the text's K and V, and the note.
    Raises `InputError` unless the file is whole, and of this model, dtype and RoPE."""
    name = model.config.name
    problem = f"there is no KV snapshot {shorten(path)} for {name}"
    with explain(problem, "name one of this model, or set dtype="), path.open("rb") as file:
        if not begins_as_snapshot(file):  # whose header may say any length
            raise ValueError("it is another file")
        text = file.read(int.from_bytes(file.read(8), "little"))
        header = json.loads(text)
        facts = header["__metadata__"]
        for fact, value in manifest_of(model).items():
            if facts.get(fact) != value:
                got = shorten(facts.get(fact), 40)
                raise ValueError(f"its {fact} is {got}, {name} has {shorten(value, 40)}")
        num_tokens = header["tokens"]["shape"][0]
        if text != header_of(model, num_tokens, facts.get("note", "")):
            raise ValueError("it is damaged")
        data = np.fromfile(file, "u1")  # not mapped: the file may change, or be deleted
        tokens, kv, total = np.split(data, [4 * num_tokens, -8])
        if crc32(data[:-8].data, crc32(text)) != total.view("<u8").item():
            raise ValueError("it is damaged")
        kv_LPKTD = torch.from_numpy(kv).view(model.dtype).view(header["kv"]["shape"])
    keys_LBKTD, values_LBKTD = kv_LPKTD.unsqueeze(2).unbind(1)
    full = FullCache(keys_LBKTD, values_LBKTD)
    return HeldRow(full, 0, tokens.view("i4").tolist()), facts.get("note", "")


def write_snapshot(path: Path, source: HeldRow, model: Llama, note: str) -> int:
    """Writes K and V of `source`, and a note; returns its number of tokens. Raises `InputError`."""
    num_tokens = len(source.tokens)
    header = header_of(model, num_tokens, note)
    with torch.inference_mode(), explain(f"cannot write {shorten(path)}", "name a file elsewhere"):
        check_place(path)
        number, unfinished = tempfile.mkstemp(".unfinished", ".minitri-", path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                total = crc32(header)
                pairs = chain.from_iterable(source.layers(num_tokens))
                tokens = torch.tensor(source.tokens, dtype=torch.int32)
                for values in chain([tokens], pairs):
                    data = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                    file.write(data)
                    total = crc32(data, total)
                file.write(total.to_bytes(8, "little"))
                file.flush()
                os.fsync(file.fileno())
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return num_tokens


def check_place(path: Path) -> None:
    """Raises `ValueError` if a KV snapshot cannot be in this place, or would replace another file.
    A snapshot may be overwritten; links, devices and files of other programs stay."""
    if not os.access(path.parent, os.W_OK):
        raise ValueError("its folder is missing, or must not be written to")
    if os.path.lexists(path):
        if path.is_symlink() or not path.is_file():
            raise ValueError("a link, folder or device is there")
        with path.open("rb") as file:
            if not begins_as_snapshot(file):
                raise ValueError("another file is there, which would be lost")


def begins_as_snapshot(file: BufferedReader) -> bool:
    """Whether a file that was just opened begins like a snapshot of any version of its format."""
    return file.peek(99)[8:].startswith(START)


def times_of(files: Iterable[Path]) -> dict[Path, int]:
    """Times of files' last change in ns: ctime, as a replaced file may keep the old mtime."""
    return {file.absolute(): file.stat().st_ctime_ns for file in files}


def fingerprint_of(files: dict[Path, int], form: object) -> Callable[[], str]:
    """Makes a function that returns a digest of files of weights, and `form`, how memory has them.
    Its first call reads them, 2 GB/s; raises `InputError` if times of change in `files` are old."""

    @functools.cache
    def fingerprint() -> str:
        with explain("the files of the weights cannot be identified", "load the model again"):
            sums = list[int]()
            for path in files:
                with path.open("rb") as file:
                    sums += map(crc32, iter(lambda: file.read(1 << 24), b""))
            if files != times_of(files):
                raise ValueError("they were changed after they were opened")
        return sha256(f"{sums} {form}".encode()).hexdigest()

    return fingerprint
