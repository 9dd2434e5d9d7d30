"""A folder in the Hugging Face layout: JSON files, and weights in safetensors or .bin files.

Code in a pickle is refused, never run. A file that is no regular file is not opened.
"""

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.hf_config import as_token_ids, explain, printable, read_config


class Folder:
    """A model in the Hugging Face layout; `path` is the folder, or one weight file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent

    def config(self, name: str) -> ModelConfig:
        """The model's shape. End-of-sequence tokens in generation_config.json win."""
        config = read_config(read_json(self.folder / "config.json"), name)
        eos = as_token_ids(self.generation_config.get("eos_token_id"))
        return config.with_eos(eos or config.eos_token_ids)

    @property
    def generation_config(self) -> dict[str, Any]:
        """What its generation_config.json holds; nothing if there is none."""
        return read_json(self.folder / "generation_config.json", or_nothing=True)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        """Every weight under its name, one at a time; a shard is closed before the next opens.

        A weight that is in several shards is taken from the one that the index names.
        """
        files, index = weight_files(self.path)
        for file in files:
            stored = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
            yield from (pair for pair in stored if index.get(pair[0], file.name) == file.name)


def read_json(path: Path, *, or_nothing: bool = False) -> dict[str, Any]:
    """A JSON object from a file, or an `InputError`; with `or_nothing` it may be missing."""
    with explain(f"{path} is not readable JSON", OSError, ValueError, RecursionError):
        if not path.exists():
            if or_nothing:
                return {}
            raise InputError(
                f"{path.parent} has no {path.name}; give a folder in the Hugging Face layout"
            )
        if not path.is_file():  # a pipe might never end
            raise InputError(f"{path} is no regular file; give a folder in the Hugging Face layout")
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise InputError(
            f"{path} holds a {type(found).__name__}, not a JSON object; download it again"
        )
    return found


def weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards of a checkpoint, and its index: for the names of tensors, those of their shards.

    Safetensors win over .bin where a folder has both. A single file needs no index.
    """
    if path.is_file():
        return [path], {}
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = path / name, path / f"{name}.index.json"
        if index.exists():
            return _indexed_files(index)
        files = [single] if single.exists() else list(path.glob(f"*{single.suffix}"))
        if len(files) == 1 and files[0].is_file():
            return files, {}
    raise InputError(
        f"{path} has no weights; expected model.safetensors, pytorch_model.bin, or shards with "
        "their index"
    )


def _indexed_files(index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    folder = index.parent
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download it again")
    for name in weight_map.values():
        shown = shorten(repr(name), 60)
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{index} points outside its folder, to {shown}; do not trust this checkpoint"
            )
        is_there = False
        with suppress(OSError):  # of a name that is too long
            is_there = (folder / name).is_file()
        if not is_there:
            raise InputError(
                f"{folder} lacks the shard {shown} that {index.name} lists; download it again"
            )
    return [folder / name for name in sorted(set(weight_map.values()))], weight_map


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with explain(f"{file} is damaged or cut short", SafetensorError, OSError):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                yield name, shard.get_tensor(name)


def _pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    damages = (RuntimeError, EOFError, OSError, ValueError)
    try:
        with explain(f"{file} is damaged or cut short", *damages, limit=90), file.open("rb") as raw:
            is_zip = raw.read(4) == b"PK\x03\x04"  # torch 1.6 or newer: can be mapped
            with warnings.catch_warnings(action="ignore"):  # remarks on protocols
                shard = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        reason = printable(str(error).replace("WeightsUnpickler error:", ""), 90)
        raise InputError(
            f"{file} is a pickle with more than tensors in it, which could run code; nothing was "
            f"run; use a safetensors version ({reason})"
        ) from None
    if not isinstance(shard, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in shard.items()
    ):
        raise InputError(
            f"{file} is not a dictionary of tensors; give the model's weights, not a training state"
        )
    yield from ((name, value.detach()) for name, value in shard.items())  # of a Parameter, too
