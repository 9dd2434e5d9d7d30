"""KV snapshots: K and V of a text in a file, so that a later run need not read the text again.

One safetensors file: `tokens`, then `keys.L` and `values.L` (K, T, D) of every layer, and the
checksums of all of these. The manifest in its header says which weights, dtype and RoPE they were
computed with. The file is mapped into memory. It is written under another name and renamed when it
is complete.

Legend: L layers, T tokens, K KV heads, D head dim.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitri.caches.prefixes import KVSource
from minitri.config import ModelConfig
from minitri.errors import InputError, shorten

FORMAT = "minitri KV snapshot 1"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SAMPLE = 4096
"""Numbers of each weight, evenly spread, by which weights are recognised."""
ADVICE = "read the text again and save anew"
DAMAGES = SafetensorError, OSError, LookupError, ValueError, TypeError, RuntimeError
"""What reading a file that is not as it was written may raise."""


def sampled(weight: Tensor) -> str:
    """The hash of some numbers of a tensor."""
    flat = weight.reshape(-1)
    some = flat[:: -(-len(flat) // SAMPLE) or 1].double().cpu()
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Origin:
    """What K and V of a text depend on besides the text."""

    config: ModelConfig
    dtype: torch.dtype
    fingerprint: str
    """Of the weights."""

    @property
    def manifest(self) -> dict[str, str]:
        """The same in words, for the header of a file."""
        rope = self.config.rope
        digest = hashlib.sha256(repr(rope).encode()).hexdigest()
        return {
            "format": FORMAT,
            "weights": self.fingerprint,
            "dtype": DTYPES[self.dtype],
            "rope": f"{rope.describe()}, {digest[:16]}",
        }

    def contents(self, num_tokens: int) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of all tensors of a file, in their order."""
        config = self.config
        names = [f"{kind}.{n}" for n in range(config.num_layers) for kind in ("keys", "values")]
        one = (DTYPES[self.dtype], [config.num_kv_heads, num_tokens, config.head_dim])
        checksums = {"checksums": ("I64", [1 + len(names)])}
        return {"tokens": ("I32", [num_tokens])} | dict.fromkeys(names, one) | checksums


class Snapshot:
    """A `KVSource`: a file of `write_snapshot`, open."""

    def __init__(self, name: str, origin: Origin) -> None:
        """Raises `InputError` unless the file is whole, and of this model, dtype and RoPE."""
        self._name = shorten(name)
        self._num_layers = origin.config.num_layers
        if not Path(name).is_file():
            raise InputError(f"there is no KV snapshot {self._name}; give a file that was saved")
        with self._reading():
            self._file = safe_open(name, "pt").__enter__()
            facts = self._file.metadata() or {}
        for fact, value in origin.manifest.items():
            if facts.get(fact) != value:
                had, now = shorten(repr(facts.get(fact)), 60), shorten(repr(value), 60)
                raise InputError(
                    f"the KV snapshot {self._name} has {fact} {had}, {origin.config.name} has "
                    f"{now} here; {ADVICE}"
                )
        with self._reading():
            self.tokens: list[int] = self._file.get_tensor("tokens").tolist()
            self.num_exact = int(facts["num_exact"])
            self.note = facts["note"]
            self._check(origin)

    def layers(self, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `KVSource`."""
        for layer in range(self._num_layers):
            slices = (self._file.get_slice(f"{kind}.{layer}") for kind in ("keys", "values"))
            keys_KTD, values_KTD = (slots[:, :num_tokens] for slots in slices)
            yield keys_KTD, values_KTD

    def _check(self, origin: Origin) -> None:
        """Raises `ValueError` unless all that the file holds is as it was written."""
        checksums = [*self._file.get_tensor("checksums").tolist(), None]
        contents = origin.contents(len(self.tokens))
        for (name, (_, shape)), checksum in zip(contents.items(), checksums, strict=True):
            tensor = self._file.get_tensor(name)
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {shape}")
            if checksum not in (None, zlib.crc32(as_bytes(tensor))):
                raise ValueError(f"the checksum of {name} is wrong")
        if not 0 <= self.num_exact <= len(self.tokens):
            raise ValueError(f"{self.num_exact} of {len(self.tokens)} tokens are said to be exact")
        if not all(0 <= token < origin.config.vocab_size for token in self.tokens):
            raise ValueError("its tokens are not those of the model")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except DAMAGES as error:
            reason = shorten(error, 90)
            raise InputError(
                f"the KV snapshot {self._name} is damaged ({reason}); {ADVICE}"
            ) from None


def write_snapshot(name: str, source: KVSource, origin: Origin, note: str = "") -> int:
    """Writes all tokens of a source to a file, and a note; returns how many tokens.

    Raises `InputError`.
    """
    path = Path(name)
    num_tokens = len(source.tokens)
    facts = origin.manifest | {"num_exact": str(source.num_exact), "note": note}
    try:
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            with unfinished.open("wb") as file:
                _write_header(file, facts, origin.contents(num_tokens))
                checksums = [_write(file, torch.tensor(source.tokens, dtype=torch.int32))]
                for pair in source.layers(num_tokens):
                    checksums += [_write(file, slots_KTD) for slots_KTD in pair]
                _write(file, torch.tensor(checksums))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or no name
        reason = shorten(getattr(error, "strerror", None) or error, 90)
        raise InputError(
            f"cannot write {shorten(name)} ({reason}); name a file in a folder with room"
        ) from None
    return num_tokens


def _write_header(
    file: BinaryIO, facts: dict[str, str], tensors: dict[str, tuple[str, list[int]]]
) -> None:
    """The header of a safetensors file: the length of a JSON object, and the object."""
    header = dict[str, Any](__metadata__=facts)
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + torch.Size(shape).numel() * int("".join(filter(str.isdigit, dtype))) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write(file: BinaryIO, values: Tensor) -> int:
    """Writes the numbers of a tensor; returns their checksum."""
    data = as_bytes(values.cpu())
    file.write(data)
    return zlib.crc32(data)


def as_bytes(values: Tensor) -> memoryview:
    """The numbers of a tensor as they stand in memory."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data
