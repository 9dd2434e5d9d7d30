"""Models on kernels with weights of 4 or 8 bits: kept from a file, or as a copy that proposes.

A copy shares everything else with its model. In 4 bits it reads a third of the bytes per pass,
which makes it a good proposer for the model itself.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from minitri.cpu.kernel_layers import KernelHead, KernelLayers, KernelLinear, KernelTiedHead
from minitri.cpu.quantized import GROUP, quantize, row_widths
from minitri.model.llama import Llama
from minitri.model.replace import Factories, copy_with

log = logging.getLogger("minitri")

Stored = Mapping[tuple[str, tuple[int, ...]], int]
"""Bits of the quantized matrices of a file, by name and shape."""


def keep_quantized(model: Llama, places: Mapping[str, Tensor], stored: Stored) -> set[str]:
    """Makes the layers of a model on kernels quantized, and empty, where a file has them so.

    The tensors of the file fill `places`, views of weights; several fill a fused projection, which
    needs all of them in as many bits. Returns the names of those that are to come quantized.
    """
    fillers: dict[int, list[str]] = {}
    for name, place in places.items():
        fillers.setdefault(place.untyped_storage().data_ptr(), []).append(name)
    layers = {p: layer for p, layer in model.named_modules() if isinstance(layer, KernelLinear)}
    num_kept = 0
    kept: set[str] = set()
    for path, layer in layers.items():
        names = fillers[layer.weight.untyped_storage().data_ptr()]
        bits, *others = {stored.get((name, tuple(places[name].shape))) for name in names}
        if others or bits is None:
            continue
        shape = (layer.out_features, sum(row_widths(layer.in_features, bits)))
        packed_NX = torch.empty(shape, dtype=torch.uint8)
        model.set_submodule(path, type(layer)(layer, layer.kernels, packed_NX, bits))
        num_kept += 1
        kept |= set(names)
    model.num_bytes = sum(weight.nbytes for weight in model.parameters())
    log.info("%d of %d matrices stay quantized", num_kept, len(layers))
    return kept


def quantized_copy(model: Llama) -> Llama:
    """A copy of a model on kernels with linear layers of 4 bits; it shares the rest, among it those
    layers of the model that have as few.

    Its LM head has 8 bits: with 4 of them SmolLM2's copy would agree with it on 79 % of the tokens,
    instead of 99.
    """

    def quantized(layer: KernelLinear) -> KernelLinear:
        bits = 8 if isinstance(layer, KernelHead) else 4
        if layer.in_features % GROUP or layer.bits <= bits:
            return layer
        packed_NX = quantize(layer.plain_weight(torch.float32), bits)
        return type(layer)(layer, layer.kernels, packed_NX, bits)

    factories: Factories = {
        KernelLinear: quantized,
        KernelHead: quantized,
        KernelTiedHead: quantized,
        KernelLayers: lambda layers: KernelLayers(layers, layers.kernels),
    }
    return copy_with(model, factories)
