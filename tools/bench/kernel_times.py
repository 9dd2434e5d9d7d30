"""Times of single kernels by graph replay: `python -m tools.bench.kernel_times`.

Attention of one layer by every backend, for short blocks, and products with the matrices of a layer
in their own type and in 8 and 4 bits, each next to the bytes that it reads. A graph holds many
calls, on different matrices, so that neither launches nor the L2 cache count. On a CPU they run one
after the other.

Legend: B batch, K KV heads, D head dim, S slots, T tokens of a block, M rows.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minitri.apps.plan import config_of
from minitri.core.config import ModelConfig
from minitri.core.errors import InputError
from minitri.core.graphs import GraphPool
from minitri.core.settings import BACKENDS, GenerationConfig, SpeculationConfig
from minitri.devices.choose import choose_device, retrieval_copy
from minitri.devices.gpu.attention_backends import make_backend
from minitri.devices.gpu.kernels import problem_with
from tools.bench.bandwidth import median_seconds
from tools.bench.synthetic import Setup, random_model

COPIES = 4
"""Layers, whose matrices together are larger than the L2 cache."""
BLOCKS = (1, 7, 17)
MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
WEIGHTS = ("same", "int8", "int4")
CALLS = 8


def microseconds(run: Callable[[int], Tensor], device: torch.device) -> float:
    """Microseconds of a call of `run`, which gets the number of the call."""

    def calls() -> Tensor:
        return [run(number) for number in range(CALLS)][-1]

    replay = GraphPool(device).record(calls)[0] if device.type == "cuda" else calls
    return 1e6 * median_seconds(replay) / CALLS


def show(name: str, run: Callable[[int], Tensor], num_bytes: int, device: torch.device) -> None:
    """Prints a line; one with the reason if it does not work."""
    taken: list[float] = []
    problem = problem_with(lambda: taken.append(microseconds(run, device)))
    if problem:
        print(f"{name:36s} fails: {problem}", flush=True)
        return
    speed = num_bytes / taken[0] / 1e3
    print(f"{name:36s} {taken[0]:10.1f} us {speed:10.1f} GB/s", flush=True)


def time_attention(config: ModelConfig, context: int, where: dict[str, Any]) -> None:
    """Every backend over one layer's K and V."""
    device = where["device"]
    size = (1, context + 32, config.num_kv_heads, config.head_dim)
    keys_BKSD, values_BKSD = (torch.randn(size, **where).transpose(1, 2) for _ in range(2))
    lengths_B = torch.tensor([context], device=device)

    def attend(name: str, q_BTHD: Tensor, _: int) -> Tensor:
        return make_backend(name)(q_BTHD, keys_BKSD, values_BKSD, lengths_B, None)

    for name in BACKENDS:
        for T in BLOCKS:
            q_BTHD = torch.randn(1, T, config.num_heads, config.head_dim, **where)
            run = functools.partial(attend, name, q_BTHD)
            show(f"attention {name}, T={T}", run, 2 * keys_BKSD.nbytes, device)


def time_matrices(config: ModelConfig, where: dict[str, Any]) -> None:
    """Products with the matrices of some layers, and of their copies in fewer bits."""
    device = where["device"]
    settings = (SpeculationConfig(), GenerationConfig(), (0.0, 0.0), where["dtype"], device)
    shape = dataclasses.replace(config, num_layers=COPIES)
    model = random_model(shape, Setup(shape, None, *settings))

    def multiply(layers: list[Any], name: str, x: Tensor, number: int) -> Tensor:
        return matrix_of(layers[number % COPIES], name)(x)

    for weights in WEIGHTS:
        try:
            layers = list((retrieval_copy(model, weights) or model).layers)
        except InputError as error:
            print(f"{weights}: {error}", flush=True)
            continue
        for name in MATRICES:
            matrix = matrix_of(layers[0], name)
            num_bytes = sum(it.nbytes for it in matrix.parameters())
            for M in (1, 3, 7):
                x = torch.randn(1, M, matrix.in_features, **where)
                run = functools.partial(multiply, layers, name, x)
                show(f"{name}, {weights}, M={M}", run, num_bytes, device)


def matrix_of(layer: Any, name: str) -> Any:
    return getattr(layer.self_attn if name in ("qkv_proj", "o_proj") else layer.mlp, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama2-7b-128k", metavar="NAME")
    parser.add_argument("--context", type=int, default=122880, metavar="S")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = choose_device(args.device)
    config = config_of(args.shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode():
        time_attention(config, args.context, {"device": device, "dtype": dtype})
        time_matrices(config, {"device": device, "dtype": dtype})


if __name__ == "__main__":
    main()
