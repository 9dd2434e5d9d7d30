"""Weights from disk into a `Llama`: from a Hugging Face folder or a GGUF file.

Every tensor is copied into its place, a view of a parameter, so memory holds one copy of them. Some
drafters borrow the embedding table of their target (`ModelConfig.draft_of`); with another target
they would guess badly without any error, so their files keep a sample of the right table.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.model.execution import Ranks
from minitri.core.model.linear import TrimmedHead
from minitri.core.model.llama import Llama, sample_of_vocabulary
from minitri.devices.choose import attention_for, kernels_for
from minitri.devices.cpu.build import identity
from minitri.devices.cpu.kernel_layers import keep_quantized, split_projections, use_kernels
from minitri.devices.cpu.packed import can_pack, pack_linears
from minitri.devices.cpu.products import is_kernel_faster
from minitri.devices.gpu.fused_modules import fuse_if_possible
from minitri.devices.parallel.group import RankGroup
from minitri.devices.parallel.split import SplitLlama, share
from minitri.files.gguf.blocks import FORMS
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder
from minitri.files.snapshots import checksum

MIN_SIMILARITY = 0.9
"""Least median cosine of a drafter's sample of embeddings: copies of one model differ a little."""
NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.linear.weight": "lm_head.weight",
    "embedding_sample": "target.embedding_sample",
}
"""What files call tensors outside the layers, as far as they do not call them as `Llama` does."""

Checkpoint = Folder | GgufFile


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, by its ending, or else a Hugging Face folder. Raises `InputError`."""
    if path.is_file():
        if path.suffix == ".gguf":
            return GgufFile(path)
        raise InputError(f"{path} is a file but no .gguf; give such a file, or a model's folder")
    if not (path / "config.json").exists():
        raise InputError(f"{path} has no config.json; give a folder in the Hugging Face layout")
    return Folder(path)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    target: Llama | None = None,
    native: bool = False,
    progress: bool = False,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Llama:
    """A model that is ready to run. Raises `InputError` for files that do not fit the config.

    `target` lends its embeddings to a drafter without; `native` leaves weights quantized."""
    lender = target if config.draft_of is not None else None
    options: dict[str, Any] = {"dtype": dtype, "device": device, "target": lender}
    options["attend"] = attention_for(device, dtype, config, attention)
    advice = "use a smaller model or dtype, or check the sizes in the config"
    with explain(f"the weights of {config.name} do not fit on {device}", advice):
        # There may be no memory, or sizes may be beyond those of any tensor.
        make = partial(SplitLlama, ranks=ranks) if isinstance(ranks, RankGroup) else Llama
        model = make(config, **options)
    kernels = kernels_for(device, config) if ranks.count == 1 else None
    by = device.type
    if kernels is not None:
        use_kernels(model, kernels)
        by = f"{identity()} {kernels.instructions} {kernels.num_threads}"
        by += f" {is_kernel_faster(kernels, dtype)}"
    model.execution = replace(model.execution, computed_by=by)
    packed: dict[str, Tensor] = {}
    if native and kernels is not None and isinstance(checkpoint, GgufFile):
        forms = checkpoint.quantized()
        split_projections(model, forms, kernels)
        kept = keep_quantized(model, placements(model), forms)
        packed = {name: it for name, it in placements(model).items() if name in kept}
    if native and not packed:
        raise InputError(
            f"weights=native needs a GGUF file with matrices of {', '.join(FORMS)} and the "
            f"compiled kernels, which {config.name} on {device} does not have; leave it out"
        )
    _fill(model, checkpoint.tensors(config, packed, kernels), checkpoint.path, progress)
    if lender is not None:
        _check_drafter(model, lender, checkpoint.path)
    if kernels is None and can_pack(dtype, device):
        pack_linears(model)
    model = fuse_if_possible(model).eval()
    if isinstance(model, SplitLlama):
        model.add_up()
    return model


def _check_drafter(model: Llama, target: Llama, path: Path) -> None:
    """Raises `InputError` unless the target's table is the one that the drafter was made with."""
    config = model.config
    lent = target.config
    similarity = 0.0
    if (config.vocab_size, config.hidden_size) == (lent.vocab_size, lent.hidden_size):
        rows = target.embed(sample_of_vocabulary(config).to(target.device)).float()
        sample = model.embedding_sample.float()
        similarity = float(F.cosine_similarity(rows, sample, dim=-1).median())
    if not similarity > MIN_SIMILARITY:
        raise InputError(
            f"the drafter {config.name} was made for {shorten(config.draft_of)}, whose "
            f"embeddings are not those of {lent.name}; use another, or draft=suffix"
        )
    assert isinstance(model.lm_head, TrimmedHead)
    ids = model.lm_head.token_ids
    if not 0 <= ids.min() <= ids.max() < config.vocab_size or len(ids.unique()) < len(ids):
        raise InputError(
            f"{path}: lm_head.token_ids are not {len(ids)} different tokens of "
            f"{config.vocab_size}; make or download it again"
        )


def placements(model: Llama) -> dict[str, Tensor]:
    """Where every tensor of a checkpoint goes: its name, and the view of a parameter it fills."""
    config = model.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {  # the tensors that fill a fused projection, and how many rows each of them has
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    names = dict(NAMES)
    if config.tie_word_embeddings:
        names["lm_head.weight"] = names["embed_tokens"]
    places: dict[str, Tensor] = {}
    for path, tensor in model.state_dict().items():
        if path.startswith("layers."):
            block, module, kind = path.rsplit(".", 2)
            sizes = fused.get(module, {module: len(tensor)})
            for name, rows in zip(sizes, tensor.split([*sizes.values()]), strict=True):
                places[f"model.{block.removesuffix('.qkv_proj')}.{name}.{kind}"] = rows
        else:
            places[names.get(path, path)] = tensor
    return places


def _fill(model: Llama, tensors: Iterator[tuple[str, Tensor]], path: Path, progress: bool) -> None:
    missing = placements(model)
    unexpected = []
    checksums = dict[str, int]()
    disable = None if progress else True  # None: where standard error is no terminal
    with tqdm(desc="loading weights", total=len(missing), leave=False, disable=disable) as bar:
        for name, tensor in tensors:
            if name in missing:
                part = share(name, tensor, model.execution.ranks)
                _copy(part, missing.pop(name), f"{path}: {name}")
                checksums[name] = checksum({}, tensor)
                bar.update()
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
    digest = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
    model.execution = replace(model.execution, fingerprint=digest)
    if missing or unexpected:
        names = shorten(", ".join([*unexpected, *missing]))
        raise InputError(
            f"{path} lacks {len(missing)} tensors and has {len(unexpected)} unexpected: {names}; "
            "weights and config belong to different models, or the download is incomplete"
        )


def _copy(tensor: Tensor, place: Tensor, name: str) -> None:
    if tensor.is_floating_point() != place.is_floating_point() or tensor.shape != place.shape:
        found, wanted = (f"{it.dtype} {tuple(it.shape)}" for it in (tensor, place))
        raise InputError(
            f"{name} is {found} where the config asks for {wanted}; use a checkpoint that is not "
            "quantized, and its own config"
        )
    with explain(f"{name} is no plain tensor"):
        place.copy_(tensor)
