"""What single kernels take, by graph replay: `python3 -m tools.bench.kernel_times`.

Attention of one layer by every backend, for short blocks, and products with the matrices of a layer
in their own type and in 8 and 4 bits, each next to the bytes that it reads. A graph holds many
calls, on different matrices, so that neither launches nor the L2 cache count. On a CPU every kernel
runs once, to show that it does.

Legend: B batch, K KV heads, D head dim, S slots, T tokens of a block, M rows.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from minitri.errors import InputError
from minitri.gpu.attention_backends import BACKENDS, make_backend
from minitri.gpu.kernels import problem_with
from minitri.loading.devices import retrieval_copy
from minitri.loading.named_models import shape_of
from minitri.settings import GenerationConfig, SpeculationConfig
from tools.bench.synthetic import Setup, random_model

COPIES = 4
"""Layers, whose matrices together are larger than the L2 cache."""
WEIGHTS = ("same", "int8", "int4")
CALLS, REPLAYS = 20, 5


def microseconds(run: Callable[[int], object], device: torch.device) -> float:
    """What a call takes; it is given the number of the call."""
    if device.type != "cuda":
        started = time.perf_counter()
        run(0)
        return 1e6 * (time.perf_counter() - started)
    for number in range(3):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            run(number)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / (REPLAYS * CALLS)


def show(name: str, run: Callable[[int], object], num_bytes: int, device: torch.device) -> None:
    """Prints a line; one with the reason if it does not work."""
    taken: list[float] = []
    if problem := problem_with(lambda: taken.append(microseconds(run, device))):
        print(f"{name:36s} fails: {problem}", flush=True)
        return
    speed = num_bytes / taken[0] / 1e3
    print(f"{name:36s} {taken[0]:10.1f} us {speed:10.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama2-7b-128k", metavar="NAME")
    parser.add_argument("--context", type=int, default=122880, metavar="S")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device, config = torch.device(args.device), shape_of(args.shape)
    assert config is not None
    config = dataclasses.replace(config, num_layers=COPIES)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"device": device, "dtype": dtype}
    size = (1, args.context + 32, config.num_kv_heads, config.head_dim)
    keys_BKSD, values_BKSD = (torch.randn(size, **options).transpose(1, 2) for _ in range(2))
    lengths_B = torch.tensor([args.context], device=device)
    with torch.inference_mode():
        for name in BACKENDS:
            for T in (1, 7, 17):
                q_BTHD = torch.randn(1, T, config.num_heads, config.head_dim, **options)
                inputs = (q_BTHD, keys_BKSD, values_BKSD, lengths_B, None)
                show(
                    f"attention {name}, T={T}",
                    lambda _, name=name, inputs=inputs: make_backend(name)(*inputs),
                    2 * keys_BKSD.nbytes,
                    device,
                )
        del keys_BKSD, values_BKSD
        settings = (SpeculationConfig(), GenerationConfig(), (0.0, 0.0), dtype, device)
        model = random_model(config, Setup(config, None, *settings))
        for weights in WEIGHTS:
            try:
                layers = list((retrieval_copy(model, weights) or model).layers)
            except InputError as error:
                print(f"{weights}: {error}", flush=True)
                continue
            for name, matrix in matrices_of(layers[0]).items():
                for M in (1, 3, 7):
                    x = torch.randn(1, M, matrix.in_features, **options)
                    show(
                        f"{name}, {weights}, M={M}",
                        lambda n, x=x, name=name, those=layers: matrices_of(those[n % COPIES])[
                            name
                        ](x),
                        sum(it.nbytes for it in matrix.parameters()),
                        device,
                    )


def matrices_of(layer: Any) -> dict[str, Any]:
    """The four matrices of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "q, k, v": attention.qkv_proj,
        "attention out": attention.o_proj,
        "gate, up": mlp.gate_up_proj,
        "MLP out": mlp.down_proj,
    }


if __name__ == "__main__":
    main()
