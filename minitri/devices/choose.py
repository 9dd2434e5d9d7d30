"""Chooses how a model runs: device, dtype, attention, kernels, copies in few bits."""

import os
from contextlib import suppress
from functools import partial

import torch

from minitri.core.config import ModelConfig
from minitri.core.decoding.verification import verify, verify_block
from minitri.core.errors import InputError
from minitri.core.log import log
from minitri.core.model.attention import Attend
from minitri.core.model.execution import Execution, Ranks
from minitri.core.model.linear import Linear, TiedHead
from minitri.core.model.llama import Llama, gate
from minitri.core.roofline import default_copy_bits
from minitri.devices.cpu.kernel_layers import (
    KernelHead,
    KernelLayers,
    KernelLinear,
    KernelTable,
    KernelTiedHead,
    quantized_copy,
)
from minitri.devices.cpu.kernels import MAX_HEAD_DIM, Kernels, load_kernels
from minitri.devices.cpu.pytorch import attend_cpu, can_pack
from minitri.devices.cpu.rounds import rounds_of
from minitri.devices.gpu.attention_backends import choose_attention
from minitri.devices.gpu.quantized_copies import copy_in_few_bits
from minitri.devices.replace import Factories, replace_modules


def choose_device(name: str, ranks: Ranks = Ranks()) -> torch.device:  # noqa: B008
    """The device `name`: cpu, cuda, cuda:N or auto (a GPU if any); each of several `ranks` gets
    its own GPU. Raises `InputError`."""
    # With a driver too old for this PyTorch, `device_count` counts GPUs that it cannot use.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if ranks.count > 1 and name.startswith("cuda"):
        if name != "cuda":
            raise InputError(f"device {name!r} is one GPU for {ranks.count} ranks; use cuda")
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    with suppress(RuntimeError):  # PyTorch does not know the name
        device = torch.device(name)
        if device.type == "cpu":
            return torch.device("cpu")
        if device.type == "cuda" and (device.index or 0) < num_gpus:
            return device
    seen = f"PyTorch {torch.__version__} sees {num_gpus} GPUs"
    raise InputError(f"device={name!r} is not there ({seen}); use device=cpu, or one that it sees")


def choose_dtype(name: str, device: torch.device, *, has_kernels: bool = False) -> torch.dtype:
    """The dtype `name`. auto: on a GPU bfloat16, before compute capability 8.0 float16; on a CPU
    bfloat16 if the compiled kernels (`has_kernels`) or oneDNN compute in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        is_new = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if is_new else torch.float16
    return torch.bfloat16 if has_kernels or can_pack(torch.bfloat16, device) else torch.float32


def attention_for(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, wanted: str = "auto"
) -> Attend:
    """The attention function for a model. `wanted` is a backend for GPUs (triton, flash, math), or
    auto. Raises `InputError` if that cannot be had."""
    if device.type == "cuda":
        return choose_attention(device, dtype, config, wanted=wanted)
    if wanted != "auto":
        raise InputError(f"attention={wanted} is for GPUs; leave it out on the {device.type}")
    kernels = kernels_for(device, config)
    return kernels.attend if kernels else attend_cpu


def kernels_for(device: torch.device, config: ModelConfig) -> Kernels | None:
    """The compiled CPU kernels if they support this device and model, else None."""
    is_known = config.has_kernels and config.head_dim <= MAX_HEAD_DIM
    return load_kernels() if device.type == "cpu" and is_known else None


def use_kernels(model: Llama, kernels: Kernels) -> None:
    """Puts kernels in place of a model's modules and attention, and sets `model.execution`."""
    layers = replace_modules(model.layers, {Linear: partial(KernelLinear, kernels=kernels)})
    if model.dtype == torch.float32:  # with several threads SiLU's bits depend on other rows
        for layer in layers:
            layer.mlp.gate = kernels.threads(1)(gate)
    heads: Factories = {
        Linear: partial(KernelHead, kernels=kernels),
        TiedHead: partial(KernelTiedHead, kernels=kernels),
    }
    model.layers = KernelLayers(layers, kernels)
    model.lm_head = replace_modules(model.lm_head, heads)
    if hasattr(model, "embed_tokens"):
        model.embed_tokens = KernelTable(model.embed_tokens, kernels)
    model.attend = kernels.attend
    model.execution = Execution(
        is_row_invariant=True,
        decoding=partial(kernels.threads, 1),
        reading=kernels.threads,
        probs=kernels.probs,
        rules={rule: partial(kernels.verify, rule=rule) for rule in (verify, verify_block)},
        is_narrow=not kernels.instructions.startswith("AVX-512"),
        make_slots=kernels.make_slots,
        rounds=rounds_of,
    )


def retrieval_copy(model: Llama, wanted: str) -> Llama | None:
    """A copy of the target in 4 or 8 bits to guess with the retrieval cache; None: the target does.
    `wanted`: auto, int4, int8; same, drafter: no copy. Raises `InputError` if there can be none."""
    has_kernels = model.execution.is_row_invariant
    if wanted in ("drafter", "same"):
        return None
    if model.device.type == "cuda":
        if wanted != "auto":
            return copy_in_few_bits(model, int(wanted.removeprefix("int")))
        least = model.execution.ranks.least  # shares may be uneven
        bits = default_copy_bits(model.config, least(torch.cuda.mem_get_info(model.device)[0]))
        try:
            return copy_in_few_bits(model, bits) if bits else None
        except InputError as error:
            log.warning("%s; the target guesses itself", error.message)
            return None
    if wanted == "auto" and not has_kernels:
        return None
    if wanted == "int8" or not has_kernels:
        what = f"draft_weights={wanted} cannot be had of {model.config.name} on {model.device}"
        raise InputError(f"{what}: int8 needs a GPU, int4 compiled kernels; leave it out")
    copy = quantized_copy(model)
    return copy if copy.num_bytes else None  # no bytes: the target has as few bits itself


def drafter_in_few_bits(model: Llama, wanted: str) -> Llama:
    """A 4-bit copy of a drafter; itself if `wanted` is "same", or no CPU kernels compute it."""
    if not model.execution.is_row_invariant or wanted == "same":
        return model
    copy = quantized_copy(model)
    copy.lent_embedding = model.lent_embedding
    copy.num_bytes = sum(weight.nbytes for weight in copy.parameters())
    return copy
