"""Weights from disk into a `Llama`: a Hugging Face folder (safetensors or .bin, one file or shards) or a GGUF file.

Every tensor is copied straight into its place, a view of the parameter it belongs to; fused projections are filled
part by part. So memory holds one copy of the weights plus one shard. What is missing, unexpected or of the wrong shape
is named. Pickles are read with `weights_only=True`: code in them is refused, never run.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from minitri.model.config import ModelConfig, as_token_ids
from minitri.errors import InputError, shorten
from minitri.loading.gguf_file import GgufFile
from minitri.cpu.packed import can_pack, pack_linears
from minitri.model.attention import Attend, attend_math
from minitri.model.linear import TrimmedHead
from minitri.model.llama import Layer, Llama, sample_of_vocabulary

MIN_LIKENESS = 0.9
"""Median cosine between the embeddings a drafter was made with and those of a target it may be used with."""


class Checkpoint(Protocol):
    """An opened model on disk."""

    path: Path

    def config(self, name: str) -> ModelConfig:
        """The shape of the model. Raises `InputError` for another architecture."""
        ...

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, one at a time."""
        ...


class Folder:
    """A checkpoint in the Hugging Face layout; `path` is the folder, or one weight file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent

    def config(self, name: str) -> ModelConfig:
        """From config.json; the end-of-sequence ids of generation_config.json win."""
        config = ModelConfig.from_hf(read_json(self.folder / "config.json"), name=name)
        if (self.folder / "generation_config.json").exists():
            eos = read_json(self.folder / "generation_config.json").get("eos_token_id")
            config = config.with_eos(as_token_ids(eos) or config.eos_token_ids)
        return config

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002 (the files say it all)
        """Shard after shard; a shard is let go before the next one is opened."""
        for file in weight_files(self.path):
            yield from (
                _safetensors(file) if file.suffix == ".safetensors" else _pickled_tensors(file)
            )


def open_checkpoint(path: Path) -> Folder | GgufFile:
    """A GGUF file or a Hugging Face folder, by the file's ending."""
    if not (path.is_dir() or path.is_file()):
        raise InputError(
            f"{path} is neither a folder nor a regular file; give the model's folder or file"
        )
    return GgufFile(path) if path.suffix == ".gguf" else Folder(path)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attend: Attend = attend_math,
    target: Llama | None = None,
    progress: bool = False,
) -> Llama:
    """A ready model. Raises `InputError` for files that are missing, damaged or do not fit the config.

    A drafter without embeddings needs its `target`, in the same dtype and on the same device. On CPU the weights
    end in oneDNN's packed layout (see `cpu/packed.py`).
    """
    lender = lender_of(config, target)
    try:
        model = Llama(config, dtype=dtype, device=device, target=lender, attend=attend)
    except (
        RuntimeError,
        TypeError,
    ) as error:  # out of memory, or sizes beyond what a tensor can have
        raise InputError(
            f"the weights of {config.name} do not fit on {device} ({shorten(error, 90)}); "
            "use a smaller model or dtype, or check the sizes in the config"
        ) from None
    _fill(model, checkpoint.tensors(config), checkpoint.path, progress)
    if lender is not None:
        _check_trimmed(model, lender, checkpoint.path)
    if can_pack(dtype, device):
        pack_linears(model)
    return model.eval()


def lender_of(config: ModelConfig, target: Llama | None) -> Llama | None:
    """The target if this is a drafter that reads tokens from its table, else None.

    Raises `InputError` unless the target is there and has the shape of the one that the drafter was made for.
    """
    if config.draft_of is None:
        return None
    if target is None:
        raise InputError(
            f"{config.name} is a drafter for {config.draft_of} without an embedding table of its own, not a model; "
            f"give it as --draft, and {config.draft_of} as --model"
        )
    ours, theirs = (
        (config.vocab_size, config.hidden_size),
        (target.config.vocab_size, target.config.hidden_size),
    )
    if ours != theirs:
        raise InputError(
            f"the drafter {config.name} was made for {config.draft_of}, whose embedding table is {ours}; that of "
            f"{target.config.name} is {theirs}; use another drafter, or --draft ngram"
        )
    return target


def _check_trimmed(model: Llama, target: Llama, path: Path) -> None:
    """Raises `InputError` if the id map is not one, or the target has other embeddings than the drafter was made for.

    Copies of one model differ a little, by quantization; different models have nothing in common.
    """
    head, config = model.lm_head, model.config
    assert isinstance(head, TrimmedHead)
    ids = head.token_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise InputError(
            f"{path}: lm_head.token_ids are not {len(ids)} different tokens of {config.vocab_size}; the drafter is "
            "damaged, make or download it again"
        )
    theirs = target.embed(sample_of_vocabulary(config).to(target.device)).float()
    likeness = F.cosine_similarity(theirs, model.embedding_sample.float(), dim=-1).median()
    if not likeness > MIN_LIKENESS:
        raise InputError(
            f"the drafter {config.name} was made for {config.draft_of}, whose embeddings are not those of "
            f"{target.config.name} (cosine {likeness:.2f}); use another drafter, or --draft ngram"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an `InputError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path.parent} has no {path.name}; give a folder in the Hugging Face layout"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is not readable JSON ({shorten(error)}); download it again"
        ) from None
    if not isinstance(found, dict):
        raise InputError(
            f"{path} holds a {type(found).__name__}, not a JSON object; download it again"
        )
    return found


def weight_files(path: Path) -> list[Path]:
    """The shards of a checkpoint, in order. Safetensors win over .bin where a folder has both."""
    if path.is_file():
        return [path]
    for kind, index, single in (
        ("*.safetensors", "model.safetensors.index.json", "model.safetensors"),
        ("*.bin", "pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        if (path / index).exists():
            return _indexed_files(path / index)
        if (path / single).exists():
            return [path / single]
        others = sorted(path.glob(kind))
        if len(others) == 1:
            return others
    raise InputError(
        f"{path} has no weights; expected model.safetensors, pytorch_model.bin, or shards with their index"
    )


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map; download it again")
    files = []
    for name in sorted(set(map(str, weight_map.values()))):
        if Path(name).name != name:
            raise InputError(
                f"{index} points outside its folder, to {name!r}; do not trust this checkpoint"
            )
        if not (index.parent / name).exists():
            raise InputError(
                f"{index.parent} lacks the shard {name} that {index.name} lists; download it again"
            )
        files.append(index.parent / name)
    return files


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                yield name, shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is damaged or cut short ({shorten(error)}); download it again"
        ) from None


def _pickled_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch remarks on pickle protocols; what matters comes as an error
            try:
                shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "_use_new_zipfile_serialization" not in str(error):
                    raise
                shard = torch.load(
                    file, map_location="cpu", weights_only=True
                )  # files from before torch 1.6
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{file} is a pickle with more than tensors in it, which could run code; nothing was run; "
            f"use a safetensors version ({shorten(str(error).replace('WeightsUnpickler error:', ''), 90)})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise InputError(
            f"{file} is damaged or cut short ({shorten(error, 90)}); download it again"
        ) from None
    if not isinstance(shard, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in shard.items()
    ):
        raise InputError(
            f"{file} is not a dictionary of tensors; give the model's weights, not a training state"
        )
    yield from shard.items()


def placements(model: Llama) -> dict[str, Tensor]:
    """Where every checkpoint tensor goes: its name, and the view of a parameter that it fills."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    places: dict[str, Tensor] = {"model.norm.weight": model.norm.weight}
    if isinstance(model.lm_head, TrimmedHead):
        places["lm_head.weight"] = model.lm_head.linear.weight
        places["lm_head.token_ids"] = model.lm_head.token_ids
        places["target.embedding_sample"] = model.embedding_sample
    elif config.tie_word_embeddings:
        places["model.embed_tokens.weight"] = model.lm_head.weight
    else:
        places["model.embed_tokens.weight"] = model.embed_tokens
        places["lm_head.weight"] = model.lm_head.weight
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        fused = (
            (
                layer.self_attn.qkv_proj,
                (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
            ),
            (layer.self_attn.o_proj, (("self_attn.o_proj", config.hidden_size),)),
            (
                layer.mlp.gate_up_proj,
                (
                    ("mlp.gate_proj", config.intermediate_size),
                    ("mlp.up_proj", config.intermediate_size),
                ),
            ),
            (layer.mlp.down_proj, (("mlp.down_proj", config.hidden_size),)),
        )
        prefix = f"model.layers.{number}."
        for linear, parts in fused:
            sizes = [size for _, size in parts]
            for (name, _), rows in zip(parts, linear.weight.split(sizes), strict=True):
                places[f"{prefix}{name}.weight"] = rows
            if linear.bias is not None:
                for (name, _), rows in zip(parts, linear.bias.split(sizes), strict=True):
                    places[f"{prefix}{name}.bias"] = rows
        for name in ("input_layernorm", "post_attention_layernorm"):
            places[f"{prefix}{name}.weight"] = getattr(layer, name).weight
    return places


def _fill(model: Llama, tensors: Iterator[tuple[str, Tensor]], path: Path, progress: bool) -> None:
    places = placements(model)
    missing, unexpected = dict.fromkeys(places), []
    with tqdm(
        total=len(places),
        desc="loading weights",
        unit=" tensors",
        leave=False,
        disable=not progress,
    ) as bar:
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq") or (
                name == "lm_head.weight" and name not in places
            ):
                continue  # derived from the config; or a tied head that was stored all the same
            if name not in places:
                unexpected.append(name)
                continue
            if tensor.shape != places[name].shape:
                raise InputError(
                    f"{path}: {name} has shape {tuple(tensor.shape)} but the config asks for "
                    f"{tuple(places[name].shape)}; weights and config.json belong to different models"
                )
            if (
                tensor.is_floating_point() != places[name].is_floating_point()
                or tensor.layout != torch.strided
                or tensor.is_meta
            ):
                wanted = (
                    "floating-point weights" if places[name].is_floating_point() else "integers"
                )
                raise InputError(
                    f"{path}: {name} holds {tensor.dtype} values ({tensor.layout}, {tensor.device}), not plain "
                    f"{wanted}; use a checkpoint that is not quantized"
                )
            places[name].copy_(tensor)
            missing.pop(name, None)
            bar.update()
    for problem, names in (("lacks", list(missing)), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(
                f"{path} {problem} {len(names)} tensors: {', '.join(names[:3])}{more}; "
                "weights and config belong to different models, or the download is incomplete"
            )
