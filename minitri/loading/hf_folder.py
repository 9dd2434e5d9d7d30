"""A folder in the Hugging Face layout: JSON files, and weights in safetensors or .bin files.

Code in a pickle is refused, never run. A file that is no regular file is not opened.
"""

import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import safe_open
from torch import Tensor

from minitri.config import ModelConfig
from minitri.errors import InputError, explain, shorten
from minitri.loading.hf_config import read_config
from minitri.loading.tokenizer import Backend, SentencePieceBackend, TokenizersBackend
from minitri.loading.values import as_token_ids


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

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """What its tokenizer_config.json holds; a chat template in a file of its own wins."""
        found = read_json(self.folder / "tokenizer_config.json", or_nothing=True)
        template = self.folder / "chat_template.jinja"
        if template.is_file():
            found["chat_template"] = template.read_text("utf-8")
        return found

    def tokenizer(self) -> tuple[Backend, bool]:
        """The tokenizer, and whether prompts start with BOS unless the settings say otherwise."""
        file, model = self.folder / "tokenizer.json", self.folder / "tokenizer.model"
        if model.is_file() and not file.exists():
            return SentencePieceBackend(model.read_bytes()), True
        if not file.is_file():
            raise FileNotFoundError("expected tokenizer.json or tokenizer.model")
        pipeline = tokenizers.Tokenizer.from_file(str(file))
        pipeline.no_truncation()
        pipeline.no_padding()
        return TokenizersBackend(pipeline), bool(pipeline.encode("", add_special_tokens=True).ids)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        """Every weight under its name, one at a time; a shard is closed before the next opens.

        A weight that is in several shards is taken from the one that the index names.
        """
        files, index = weight_files(self.path)
        for file in files:
            problem = f"{file} is damaged, or holds more than tensors, of which none was run"
            with explain(problem, "get it again as safetensors"):
                stored = _safetensors if file.suffix == ".safetensors" else _pickled
                for name, tensor in stored(file):
                    if index.get(name, file.name) == file.name:
                        yield name, tensor


def read_json(path: Path, *, or_nothing: bool = False) -> dict[str, Any]:
    """A JSON object from a file, or an `InputError`; with `or_nothing` it may be missing."""
    if or_nothing and not path.exists():
        return {}
    with explain(f"{path} is not readable JSON", "give a folder in the Hugging Face layout"):
        if not path.is_file():  # a pipe might never end
            raise FileNotFoundError("there is no such regular file")
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}, not an object")
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
    with explain(f"{index} does not list the shards in its folder"):
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name or not (index.parent / name).is_file():
                raise ValueError(f"it names {shorten(repr(name), 60)}, which is no file there")
        return [index.parent / name for name in names], weight_map


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as shard:
        for name in shard.keys():  # noqa: SIM118 (not a dict)
            yield name, shard.get_tensor(name)


def _pickled(file: Path) -> Iterator[tuple[str, Tensor]]:
    is_new = zipfile.is_zipfile(file)  # of torch 1.6 or newer: can be mapped
    with warnings.catch_warnings(action="ignore"):  # remarks on protocols
        shard = torch.load(file, map_location="cpu", weights_only=True, mmap=is_new)
    yield from ((str(name), value.detach()) for name, value in shard.items())
