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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minitri.caches.snapshots import sampled
from minitri.config import ModelConfig
from minitri.cpu.kernel_layers import use_kernels
from minitri.cpu.low_bit_models import keep_quantized
from minitri.cpu.packed import can_pack, pack_linears
from minitri.errors import InputError
from minitri.gpu.fused_modules import fuse_if_possible
from minitri.loading.devices import kernels_for
from minitri.loading.gguf.blocks import BITS
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_config import explain, printable
from minitri.loading.hf_folder import Folder
from minitri.model.attention import Attend, attend_math
from minitri.model.execution import Ranks
from minitri.model.linear import TrimmedHead
from minitri.model.llama import Llama, sample_of_vocabulary
from minitri.parallel.split import new_model, share_tensors

MIN_SIMILARITY = 0.9
"""Least median cosine of a drafter's sample of embeddings: copies of one model differ a little."""


Checkpoint = Folder | GgufFile


def open_checkpoint(path: Path) -> Checkpoint:
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
    if config.draft_of is not None and target is None:
        raise not_a_model(config)
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


def not_a_model(config: ModelConfig) -> InputError:
    """The error for a drafter without an embedding table that is to run alone."""
    return InputError(
        f"{config.name} is a drafter for {config.draft_of} without an embedding table of its own, "
        f"not a model; give it as --draft, and {config.draft_of} as --model"
    )


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
    head = model.lm_head
    config = model.config
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
    missing = dict.fromkeys(places)
    unexpected = []
    samples = dict[str, str]()
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
