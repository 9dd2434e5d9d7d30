"""A model's folder in the Hugging Face layout: JSON files, and weights as safetensors or .bin.

Code in a pickle is refused, never run. Only regular files are opened."""

import json
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain
from minitri.files.families import NamedTensors, as_llama
from minitri.files.hf_config import read_config
from minitri.files.snapshots import times_of
from minitri.files.vocabulary import read_model


class Folder:
    """The files of a model in a folder of the Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.adds_bos = not (path / "tokenizer.json").is_file()  # that file says it itself
        self.generation_config = read_json(path / "generation_config.json")
        self._settings = read_json(path / "config.json")

    def config(self, name: str) -> ModelConfig:
        """The config of the model called `name`; generation_config.json overrides end tokens."""
        eos = self.generation_config.get("eos_token_id")
        return read_config(self._settings | ({} if eos is None else {"eos_token_id": eos}), name)

    @cached_property
    def files(self) -> dict[Path, int]:
        """Paths of the files of weights, with the times, in ns, of their last change."""
        return times_of(weight_files(self.path))

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json, with that of other files which complete it."""
        settings = read_json(self.path / "tokenizer_config.json")
        for name in ("chat_template", "additional_chat_templates/tool_use"):
            if is_there(template := self.path / f"{name}.jinja"):
                settings[Path(name).name] = template.read_text("utf-8")
        if settings.get("added_tokens_decoder") is None:  # written by older transformers
            settings |= read_json(self.path / "special_tokens_map.json")
            added = read_json(self.path / "added_tokens.json")
            settings["added_tokens_decoder"] = {id: text for text, id in added.items()}
        return settings

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer in the folder's files. Raises any error if these are damaged."""
        settings = self.tokenizer_config
        kind = str(settings.get("tokenizer_class"))
        if is_there(file := self.path / "tokenizer.json"):
            pipeline = tokenizers.Tokenizer.from_file(str(file))
            pipeline.no_truncation()
            pipeline.no_padding()
            if kind.startswith(("GPT2Tokenizer", "Qwen2Tokenizer")):  # as `transformers` has it
                steps: Any = pipeline.pre_tokenizer
                for step in steps if hasattr(steps, "__getitem__") else [steps]:
                    if hasattr(step, "add_prefix_space"):
                        step.add_prefix_space = settings.get("add_prefix_space") is True
            return pipeline
        if is_there(model := self.path / "tokenizer.model"):
            is_legacy = settings.get("legacy", not kind.startswith("LlamaTokenizer"))
            space = "always" if is_legacy else "first"
            if settings.get("add_prefix_space") is False:
                space = "never"
            return read_model(model.read_bytes(), space)
        raise FileNotFoundError("expected tokenizer.json or tokenizer.model")

    def tensors(self, config: ModelConfig, *_: Any) -> NamedTensors:
        """Yields (name, tensor) for all weights, named as in a Llama, from one shard after the
        other. Ignores other arguments, which the method of a GGUF file needs."""
        for file in self.files:
            problem = f"{file} is damaged, or holds more than tensors, of which none was run"
            with explain(problem, "get it again as safetensors"):
                if file.suffix == ".safetensors":
                    shard = load_file(file)
                else:
                    with warnings.catch_warnings(action="ignore"):  # about pickle's protocols
                        shard = torch.load(file, map_location="cpu", weights_only=True)
                for name, tensor in shard.items():
                    yield from as_llama(str(name), tensor.detach(), config)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, an empty object if there is no file. Raises `InputError`."""
    if not is_there(path):
        return {}
    with explain(f"{path} is not readable JSON", "give a folder in the Hugging Face layout"):
        return {**json.loads(path.read_text("utf-8"))}


def weight_files(path: Path) -> list[Path]:
    """Paths of the files with a checkpoint's weights. Raises `InputError` if any is missing.
    If a folder has both formats these are safetensors, and one file rather than shards."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if is_there(path / name):
            return [path / name]
        if (index := path / f"{name}.index.json").exists():
            with explain(f"{index} does not list the shards in its folder"):
                shards = sorted({path / file for file in read_json(index)["weight_map"].values()})
                if missing := [shard.name for shard in shards if not shard.is_file()]:
                    raise FileNotFoundError(f"there is no {missing}")
                return shards
    raise lacking(path, "weights: model.safetensors, pytorch_model.bin, or shards with an index")


def is_there(file: Path) -> bool:
    """Whether a file exists. Raises `InputError` for a folder, a pipe, or a link to nothing."""
    if not file.is_file() and (file.exists() or file.is_symlink()):
        raise InputError(f"{file} is no file, or a link to one that is gone; get it again")
    return file.is_file()


def lacking(path: Path, wanted: str) -> InputError:
    """Makes the error for a folder without `wanted`, which says what the folder is instead."""
    if (path / "adapter_config.json").exists():
        return InputError(f"{path} is a LoRA adapter; merge it into its base model, and give that")
    return InputError(f"{path} has no {wanted}; give a model's whole folder, or a GGUF file")
