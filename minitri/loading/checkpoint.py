"""Weights from disk into a `Llama`: from a Hugging Face folder or a GGUF file.

Every tensor is copied straight into its place, a view of the parameter that it belongs to; several
fill one fused projection. So memory holds one copy of the weights and one shard. Whatever is
missing, unexpected or of a wrong shape is named.

Some drafters borrow the embedding table of their target (`ModelConfig.draft_of`). With another
target they would guess badly without any error. So their files keep a sample of the table that
they were made with, and loading compares it with the table that is lent.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minitri.caches.snapshots import sampled
from minitri.config import ModelConfig
from minitri.cpu.kernel_layers import use_kernels
from minitri.cpu.low_bit_models import keep_quantized
from minitri.cpu.packed import can_pack, pack_linears
from minitri.errors import InputError, explain, printable
from minitri.gpu.fused_modules import fuse_if_possible
from minitri.loading.devices import kernels_for
from minitri.loading.gguf.blocks import BITS
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_folder import Folder
from minitri.model.attention import Attend, attend_math
from minitri.model.execution import Ranks
from minitri.model.linear import TrimmedHead
from minitri.model.llama import Llama, sample_of_vocabulary
from minitri.parallel.ranks import RankGroup
from minitri.parallel.split import SplitLlama, share

MIN_SIMILARITY = 0.9
"""Least median cosine of a drafter's sample of embeddings: copies of one model differ a little."""


Checkpoint = Folder | GgufFile


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, by its ending, or else a Hugging Face folder or a file in one."""
    return GgufFile(path) if path.suffix == ".gguf" and path.is_file() else Folder(path)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attend: Attend = attend_math,
    target: Llama | None = None,
    native: bool = False,
    progress: bool = False,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Llama:
    """A model that is ready to run.

    `target` lends its embedding table to a drafter that has none; it has the same dtype and device.
    A CPU computes with compiled kernels, or else from oneDNN's packed layout (`cpu/packed.py`).
    `native` leaves quantized what the kernels can read so. Raises `InputError` for files that are
    missing, damaged or do not fit the config.
    """
    lender = target if config.draft_of is not None else None
    make: Any = partial(SplitLlama, ranks=ranks) if isinstance(ranks, RankGroup) else Llama
    advice = "use a smaller model or dtype, or check the sizes in the config"
    with explain(f"the weights of {config.name} do not fit on {device}", advice):
        # There may be no memory, or sizes may be beyond those of any tensor.
        options = {"dtype": dtype, "device": device, "target": lender, "attend": attend}
        model = make(config, **options)
    kernels = kernels_for(device, config) if ranks.count == 1 else None
    if kernels is not None:
        use_kernels(model, kernels)
    tensors = _native_tensors(model, checkpoint) if native else checkpoint.tensors(config)
    _fill(model, tensors, ranks, checkpoint.path, progress)
    if lender is not None:
        _check_drafter(model, lender, checkpoint.path)
    if kernels is None and can_pack(dtype, device):
        pack_linears(model)
    model = fuse_if_possible(model).eval()
    if isinstance(model, SplitLlama):
        model.add_up()
    return model


def _native_tensors(model: Llama, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, for a model whose layers wait for quantized ones where they can."""
    if isinstance(checkpoint, GgufFile):
        packed = keep_quantized(model, placements(model), checkpoint.quantized())
        if packed:
            return checkpoint.tensors(model.config, packed=packed)
    raise InputError(
        f"--weights native needs a GGUF file with matrices of {', '.join(BITS)} and the compiled "
        f"kernels, which {model.config.name} on {model.device} does not have; leave it out"
    )


def _check_drafter(model: Llama, target: Llama, path: Path) -> None:
    """Raises `InputError` unless the target's table is the one that the drafter was made with."""
    head = model.lm_head
    config = model.config
    assert isinstance(head, TrimmedHead)
    lent, ids = target.config, head.token_ids
    similarity = 0.0
    if (config.vocab_size, config.hidden_size) == (lent.vocab_size, lent.hidden_size):
        rows = target.embed(sample_of_vocabulary(config).to(target.device)).float()
        sample = model.embedding_sample.float()
        similarity = float(F.cosine_similarity(rows, sample, dim=-1).median())
    if not similarity > MIN_SIMILARITY:
        raise InputError(
            f"the drafter {config.name} was made for {config.draft_of}, whose embeddings are not "
            f"those of {lent.name} (cosine {similarity:.2f}); use another, or --draft suffix"
        )
    if not 0 <= ids.min() <= ids.max() < config.vocab_size or len(ids.unique()) < len(ids):
        raise InputError(
            f"{path}: lm_head.token_ids are not {len(ids)} different tokens of "
            f"{config.vocab_size}; make or download it again"
        )


def placements(model: Llama) -> dict[str, Tensor]:
    """Where every tensor of a checkpoint goes: its name, and the view of a parameter it fills."""
    config = model.config
    head = model.lm_head
    places: dict[str, Tensor] = {"model.norm.weight": model.norm.weight}
    if isinstance(head, TrimmedHead):
        places["lm_head.weight"] = head.linear.weight
        places["lm_head.token_ids"] = head.token_ids
        places["target.embedding_sample"] = model.embedding_sample
    elif config.tie_word_embeddings:
        places["model.embed_tokens.weight"] = head.weight
    else:
        places["model.embed_tokens.weight"] = model.embed_tokens
        places["lm_head.weight"] = head.weight
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {  # the tensors that fill a fused projection, and how many rows each of them has
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    for number, layer in enumerate(model.layers):
        for path, parameter in layer.named_parameters():
            *block, module, kind = path.split(".")
            sizes = fused.get(module, {module: len(parameter)})
            for name, rows in zip(sizes, parameter.split([*sizes.values()]), strict=True):
                places[".".join(("model.layers", str(number), *block, name, kind))] = rows
    return places


def _fill(
    model: Llama, tensors: Iterator[tuple[str, Tensor]], ranks: Ranks, path: Path, progress: bool
) -> None:
    missing = placements(model)
    unexpected = []
    samples = dict[str, str]()
    disable = None if progress else True  # None: where standard error is no terminal
    with tqdm(desc="loading weights", total=len(missing), leave=False, disable=disable) as bar:
        for name, whole in tensors:
            if name in missing:
                place, tensor = missing.pop(name), share(name, whole, ranks)
                _check_tensor(f"{path}: {name}", tensor, place)
                with explain(f"{path}: {name} is no plain tensor"):
                    place.copy_(tensor)
                    samples[name] = sampled(whole)
                bar.update()
            elif name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
    digests = torch.tensor(bytearray(repr(sorted(samples.items())).encode()))
    model.execution = replace(model.execution, fingerprint=sampled(digests))
    if missing or unexpected:
        names = printable(", ".join([*unexpected, *missing]))
        raise InputError(
            f"{path} lacks {len(missing)} tensors and has {len(unexpected)} unexpected: {names}; "
            "weights and config belong to different models, or the download is incomplete"
        )


def _check_tensor(name: str, tensor: Tensor, place: Tensor) -> None:
    kinds = [(it.is_floating_point(), it.shape) for it in (tensor, place)]
    if kinds[0] != kinds[1]:
        found, wanted = (f"{it.dtype} {tuple(it.shape)}" for it in (tensor, place))
        raise InputError(
            f"{name} is {found} where the config asks for {wanted}; use a checkpoint that is not "
            "quantized, and its own config"
        )
