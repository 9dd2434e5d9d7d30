"""Weights from disk into a `Llama`: from a Hugging Face folder or a GGUF file.

Every tensor is copied straight into its place, a view of the parameter that it belongs to; several
fill one fused projection. So memory holds one copy of the weights and one shard. Whatever is
missing, unexpected or of a wrong shape is named. Code in a pickle is refused, never run.

Some drafters borrow the embedding table of their target (`ModelConfig.draft_of`). With another
target they would guess badly without any error. So their files keep a sample of the table that
they were made with, and loading compares it with the table that is lent.
"""

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from minitri.caches.snapshots import sampled
from minitri.config import ModelConfig
from minitri.cpu.kernel_layers import use_kernels
from minitri.cpu.low_bit_models import keep_quantized
from minitri.cpu.packed import can_pack, pack_linears
from minitri.errors import InputError, shorten
from minitri.execution import Ranks
from minitri.gpu.fused_modules import fuse_if_possible
from minitri.loading.damage import explain, printable
from minitri.loading.devices import kernels_for
from minitri.loading.gguf.blocks import BITS
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_config import as_token_ids, read_config
from minitri.model.attention import Attend, attend_math
from minitri.model.linear import TrimmedHead
from minitri.model.llama import Llama, sample_of_vocabulary
from minitri.parallel.split import new_model, share_tensors

MIN_SIMILARITY = 0.9
"""Least median cosine of a drafter's sample of embeddings: copies of one model differ a little."""


class Folder:
    """A model in the Hugging Face layout; `path` is the folder, or one weight file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path if path.is_dir() else path.parent

    def config(self, name: str) -> ModelConfig:
        """The model's shape. End-of-sequence tokens in generation_config.json win."""
        config = read_config(read_json(self.folder / "config.json"), name)
        settings = self.folder / "generation_config.json"
        eos = as_token_ids(read_json(settings).get("eos_token_id")) if settings.exists() else ()
        return config.with_eos(eos or config.eos_token_ids)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        """Every weight under its name, one at a time; a shard is closed before the next opens.

        A weight that is in several shards is taken from the one that the index names.
        """
        files, index = weight_files(self.path)
        for file in files:
            stored = _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
            yield from (pair for pair in stored if index.get(pair[0], file.name) == file.name)


Checkpoint = Folder | GgufFile


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a Hugging Face folder, by the file's ending."""
    if not (path.is_dir() or path.is_file()):
        raise InputError(
            f"{path} is neither a folder nor a regular file; give the model's folder or file"
        )
    return GgufFile(path) if path.suffix == ".gguf" else Folder(path)


def load_model(
    checkpoint: Checkpoint, config: ModelConfig, *, dtype: torch.dtype, device: torch.device,
    attend: Attend = attend_math, target: Llama | None = None, native: bool = False,
    progress: bool = False, ranks: Ranks = Ranks(),  # noqa: B008
) -> Llama:  # fmt: skip
    """A model that is ready to run.

    `target` lends its embedding table to a drafter that has none; it has the same dtype and device.
    A CPU computes with compiled kernels, or else from oneDNN's packed layout (`cpu/packed.py`).
    `native` leaves quantized what the kernels can read so. Raises `InputError` for files that are
    missing, damaged or do not fit the config.
    """
    if config.draft_of is not None and target is None:
        raise InputError(
            f"{config.name} is a drafter for {config.draft_of} without an embedding table of its "
            f"own, not a model; give it as --draft, and {config.draft_of} as --model"
        )
    lender = target if config.draft_of is not None else None
    problem = f"the weights of {config.name} do not fit on {device}"
    advice = "use a smaller model or dtype, or check the sizes in the config"
    with explain(problem, RuntimeError, TypeError, advice=advice, limit=90):
        # There may be no memory, or sizes may be beyond those of any tensor.
        model = new_model(config, ranks, dtype=dtype, device=device, target=lender, attend=attend)
    kernels = kernels_for(device, config) if ranks.count == 1 else None
    if kernels is not None:
        use_kernels(model, kernels)
    tensors = _native_tensors(model, checkpoint) if native else checkpoint.tensors(config)
    _fill(model, share_tensors(tensors, ranks), checkpoint.path, progress)
    if lender is not None:
        _check_drafter(model, lender, checkpoint.path)
    if kernels is None and can_pack(dtype, device):
        pack_linears(model)
    return fuse_if_possible(model).eval()


def _native_tensors(model: Llama, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, for a model whose layers wait for quantized ones where they can."""
    if not model.execution.is_row_invariant:
        raise InputError(
            f"--weights native needs the compiled kernels, which {model.config.name} on "
            f"{model.device} does not use; leave it out"
        )
    stored = checkpoint.quantized() if isinstance(checkpoint, GgufFile) else {}
    packed = keep_quantized(model, placements(model), stored)
    if not packed:
        raise InputError(
            f"--weights native keeps the {', '.join(BITS)} of a GGUF file, and no matrix of "
            f"{checkpoint.path.name} is one that the kernels read so; leave it out"
        )
    assert isinstance(checkpoint, GgufFile)
    return checkpoint.tensors(model.config, packed=packed)


def _check_drafter(model: Llama, target: Llama, path: Path) -> None:
    """Raises `InputError` unless the target's table is the one that the drafter was made with."""
    head, config = model.lm_head, model.config
    assert isinstance(head, TrimmedHead)
    made_for = f"the drafter {config.name} was made for {config.draft_of}, whose"
    wanted, lent = ((shape.vocab_size, shape.hidden_size) for shape in (config, target.config))
    if wanted != lent:
        raise InputError(
            f"{made_for} embedding table is {wanted}; that of {target.config.name} is {lent}; "
            "use another drafter, or --draft suffix"
        )
    ids = head.token_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise InputError(
            f"{path}: lm_head.token_ids are not {len(ids)} different tokens of "
            f"{config.vocab_size}; the drafter is damaged, make or download it again"
        )
    lent_rows = target.embed(sample_of_vocabulary(config).to(target.device)).float()
    similarity = F.cosine_similarity(lent_rows, model.embedding_sample.float(), dim=-1).median()
    if not similarity > MIN_SIMILARITY:
        raise InputError(
            f"{made_for} embeddings are not those of {target.config.name} (cosine "
            f"{similarity:.2f}); use another drafter, or --draft suffix"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an `InputError`."""
    with explain(f"{path} is not readable JSON", OSError, ValueError, RecursionError):
        if not path.exists():
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
    weight_map, folder = read_json(index).get("weight_map"), index.parent
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


def placements(model: Llama) -> dict[str, Tensor]:
    """Where every tensor of a checkpoint goes: its name, and the view of a parameter it fills."""
    config, head = model.config, model.lm_head
    places: dict[str, Tensor] = {"model.norm.weight": model.norm.weight}
    if isinstance(head, TrimmedHead):
        places["lm_head.weight"], places["lm_head.token_ids"] = head.linear.weight, head.token_ids
        places["target.embedding_sample"] = model.embedding_sample
    elif config.tie_word_embeddings:
        places["model.embed_tokens.weight"] = head.weight
    else:
        places["model.embed_tokens.weight"] = model.embed_tokens
        places["lm_head.weight"] = head.weight
    E, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = (  # every linear layer: the tensors that fill it, and how many rows each of them has
        ("self_attn", "qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
        ("self_attn", "o_proj", {"o_proj": E}),
        ("mlp", "gate_up_proj", {"gate_proj": inner, "up_proj": inner}),
        ("mlp", "down_proj", {"down_proj": E}),
    )
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}"
        for block, linear, sizes in parts:
            for kind, parameter in layer.get_submodule(f"{block}.{linear}").named_parameters():
                for name, rows in zip(sizes, parameter.split([*sizes.values()]), strict=True):
                    places[f"{prefix}.{block}.{name}.{kind}"] = rows
        for norm, parameter in layer.named_parameters():
            if norm.endswith("norm.weight"):
                places[f"{prefix}.{norm}"] = parameter
    return places


def _fill(model: Llama, tensors: Iterator[tuple[str, Tensor]], path: Path, progress: bool) -> None:
    places = placements(model)
    missing, unexpected, samples = dict.fromkeys(places), [], dict[str, str]()
    disable = None if progress else True  # None: where standard error is no terminal
    with tqdm(desc="loading weights", total=len(places), leave=False, disable=disable) as bar:
        for name, tensor in tensors:
            if name in missing:
                _check_tensor(f"{path}: {name}", tensor, places[name])
                places[name].copy_(tensor)
                samples[name] = sampled(tensor)
                del missing[name]
                bar.update()
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
    digests = torch.tensor(bytearray(repr(sorted(samples.items())).encode()))
    model.execution = replace(model.execution, fingerprint=sampled(digests))
    for problem, names in (("lacks", list(missing)), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(
                f"{path} {problem} {len(names)} tensors: {printable(', '.join(names[:3]))}{more}; "
                "weights and config belong to different models, or the download is incomplete"
            )


def _check_tensor(name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.shape != place.shape:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)} but the config asks for "
            f"{tuple(place.shape)}; weights and config.json belong to different models"
        )
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.is_floating_point() != place.is_floating_point():
        wanted = "floating-point weights" if place.is_floating_point() else "integers"
        raise InputError(
            f"{name} holds {tensor.dtype} values ({tensor.layout}, {tensor.device}), not plain "
            f"{wanted}; use a checkpoint that is not quantized"
        )
