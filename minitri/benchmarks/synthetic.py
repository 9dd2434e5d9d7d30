"""A benchmark without weights: `python -m minitri.bench --load dummy`.

Weights and KV cache are random numbers in the shape of a named model, nothing is prefilled, and **verdicts are made
up**: each guess is accepted with a given probability. All else is as in real decoding: every forward pass, every law,
every verification and commit is computed, by the same code, so that the times are those that a real model of this shape
would have at these acceptance rates. Nothing here says anything, and `minitri.generate` cannot reach it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.assembly import build_cascade
from minitri.benchmarks.bandwidth import copy_bandwidth
from minitri.caches.full import FullCache
from minitri.gpu.offloaded_cache import OffloadedFullCache
from minitri.decoding.cascade import Cascade
from minitri.decoding.random_source import Coins, IndependentCoins
from minitri.benchmarks.compare import plotter
from minitri.model.config import ModelConfig, unknown_model
from minitri.cpu.packed import can_pack, pack_linears
from minitri.devices import attention_for, attention_name, choose_device, choose_dtype
from minitri.errors import InputError
from minitri.cli.arguments import draft_of, generation_of, positive, speculation_of, two_rates
from minitri.generation import at_work
from minitri.gpu.graphs import graph_pool
from minitri.model.llama import Llama
from minitri.model.roofline import kv_bytes_per_token, weights_per_pass
from minitri.readers import Readers, allocate_full_cache
from minitri.cli.report import phase_ms
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.loading.shapes import shape_of
from minitri.decoding.stats import Stats, spread
from minitri.decoding.verification import Proposal, Verdict

log = logging.getLogger("minitri")

WARMUP_STEPS = 3
BLOCK = 1 << 22
"""Random numbers that are made; larger tensors repeat them."""
PROFILED_STEPS = 4
"""Steps, behind those that are timed, of which a GPU's work is recorded."""


def add_dummy_flags(parser: argparse.ArgumentParser) -> None:
    """What is made up."""
    group = parser.add_argument_group(
        "--load dummy: made-up weights and verdicts, for the speed of a shape"
    )
    group.add_argument(
        "--load", choices=("real", "dummy"), default="real", help="(default: %(default)s)"
    )
    group.add_argument(
        "--shape",
        metavar="NAME",
        default="llama2-7b-128k",
        help="a named model (default: %(default)s)",
    )
    group.add_argument(
        "--context",
        type=positive,
        action="append",
        metavar="N",
        help="tokens; several make a sweep (default: 8192)",
    )
    group.add_argument(
        "--synthetic-acceptance", type=two_rates, default=(0.46, 0.92), metavar="DRAFT,RETRIEVAL",
        help="with what probability a guess is accepted (default: 0.46,0.92, about the paper's)",
    )  # fmt: skip


def measure_shape(args: argparse.Namespace) -> int:
    """Measures a shape with made-up weights and verdicts, prints, returns the exit code."""
    if args.compare or args.peers or args.profile or args.coupled:
        raise InputError(
            "--load dummy goes with none of --compare, --peers, --profile and --coupled; leave them out"
        )
    config = shape_of(args.shape)
    if config is None:
        raise unknown_model(args.shape)
    if len(args.method or []) > 1 or "auto" in (args.method or []):
        raise InputError(
            "--load dummy compares one method with autoregressive decoding; give one --method, not auto"
        )
    args.method = (args.method or ["triforce"])[0]
    draw = plotter(Path(args.plot), draw_sweep) if args.plot else None
    contexts = args.context or [8192]
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    name = draft_of(argparse.Namespace(**{**vars(args), "model": args.shape}))
    draft = shape_of(name)
    args.gamma1, args.gamma2 = args.gamma1 or 2, args.gamma2 or (16 if args.offload else 6)
    speculation = speculation_of(args)
    result = compare_dummies(
        config,
        draft,
        contexts,
        speculation,
        generation_of(args, args.new_tokens),
        args.synthetic_acceptance,
        dtype=dtype,
        device=device,
        attention=args.attention,
    )
    memory, link = result["copy_bytes_per_second"], result["host_copy_bytes_per_second"]
    print(
        f"SYNTHETIC: random weights in the shape of {args.shape}, drafter {draft.name if draft else 'ngram'}, {dtype}, "
        f"{device}, attention {result['attention']}, {speculation.plans[0]}, verdicts drawn at "
        f"{args.synthetic_acceptance}; copies: "
        f"{memory / 1e9:.1f} GB/s on the device, {link / 1e9:.1f} GB/s from the host"
    )
    for row in result["rows"]:
        print(line(row, memory, link))
    print(json.dumps(result), flush=True)
    if draw:
        draw(result)
    return 0


def fill(tensor: Tensor, scale: float, seed: int = 0) -> None:
    """Fills a tensor of any size with random numbers, in little time."""
    flat = tensor.view(-1)
    generator = torch.Generator().manual_seed(seed)
    block = (scale * torch.randn(min(BLOCK, flat.numel()), generator=generator)).to(
        tensor.device, tensor.dtype
    )
    for start in range(0, flat.numel(), BLOCK):
        part = flat[start : start + BLOCK]
        part.copy_(block[: part.numel()])


def dummy_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, attention: str = "auto"
) -> Llama:
    """A model of random weights that keep activations in range."""
    attend = attention_for(device, dtype, config, attention)
    model = Llama(config, dtype=dtype, device=device, attend=attend)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            fill(weight, 0.02, seed=len(name))
    if can_pack(dtype, device):
        pack_linears(model)
    return model.eval()


class SyntheticCoins:
    """Real decisions, of which the number of accepted guesses is replaced by a draw at a given rate."""

    def __init__(self, rate: float, seeds: list[int]) -> None:
        self._rate = rate
        self._real = IndependentCoins(seeds)
        self._generator = torch.Generator().manual_seed(sum(seeds))

    def judge(
        self, proposal: Proposal, laws_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:
        """See `Coins`."""
        real = self._real.judge(proposal, laws_BNV, starts, active)
        accepted = []
        for count in proposal.counts:
            heads = torch.rand(count, generator=self._generator) < self._rate
            accepted.append(int(heads.int().cumprod(0).sum()))
        return Verdict(accepted, real.next_tokens)


def fill_cache(full: FullCache) -> None:
    """Random K and V in every slot."""
    tensors = [full.keys, full.values]
    if isinstance(full, OffloadedFullCache):
        staging = full._staging
        tensors += [full.host_keys, full.host_values, staging.ring_keys, staging.ring_values]
    for tensor in tensors:
        if tensor.numel():
            fill(tensor, 1.0)


@torch.inference_mode()
def decode(
    target: Llama,
    draft: Llama | None,
    context: int,
    speculation: SpeculationConfig,
    generation: GenerationConfig,
    acceptance: tuple[float, float],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Decodes behind `context` made-up tokens with made-up verdicts; milliseconds per token and per phase."""
    num_new = generation.max_new_tokens
    capacity = context + num_new + 2 * speculation.max_block * (WARMUP_STEPS + PROFILED_STEPS + 2)
    full = allocate_full_cache(target, draft, [context], capacity, generation, speculation)
    fill_cache(full)
    generator = torch.Generator().manual_seed(seed)
    vocab_size = min(model.config.vocab_size for model in (target, draft) if model is not None)
    sequences = [torch.randint(vocab_size, (context,), generator=generator).tolist()]
    coins: dict[str, Coins] = {
        "draft": IndependentCoins([seed]),
        "retrieval": SyntheticCoins(acceptance[0], [seed]),
        "target": SyntheticCoins(
            acceptance[0] if speculation.method == "naive" else acceptance[1], [seed + 1]
        ),
    }
    stats = Stats(num_prompt_tokens=context)
    graphs = graph_pool(target.device, wanted=generation.cuda_graphs)
    readers = Readers(
        target, draft, full, [context], SamplingParams(0.6, top_p=0.9), speculation, graphs
    )
    cascade = build_cascade(readers, sequences, [seed], stats, coins)
    query = torch.zeros(
        target.config.num_layers, 1, target.config.num_heads, target.config.head_dim
    ).to(full.keys)
    full.advance([context - 1])
    if readers.small is not None:
        readers.small.observe(0, query)
    cascade.start()
    for _ in range(WARMUP_STEPS):
        cascade.step()
    for stage in stats.stages:
        stage.seconds = 0.0
    stats.commit_seconds = stats.rebuild_seconds = 0.0
    before = len(sequences[0])
    times: list[float] = []
    while (num_tokens := len(sequences[0]) - before) < num_new:
        started = time.perf_counter()
        cascade.step()
        times.append(1e3 * (time.perf_counter() - started))
    stats.num_decoded_tokens = num_tokens
    return {
        "synthetic": True,
        "method": speculation.method,
        "context": context,
        "ms_per_token": sum(times) / num_tokens,
        "ms_per_step": spread(times),
        "tokens_per_step": num_tokens / len(times),
        "phase_ms_per_token": phase_ms(stats),
        "idle_share": idle_share(cascade) if target.device.type == "cuda" else None,
        "on_chip": full.on_chip,
        "num_graphs": graphs.num_graphs if graphs else 0,
        "capture_seconds": graphs.capture_seconds if graphs else 0.0,
    }


def idle_share(cascade: Cascade) -> float:
    """Share of the time of some more steps in which a GPU neither computes nor copies. Recording slows the host down a
    little, so it is rather too high."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        started = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            cascade.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    work = [
        event.time_range for event in recorded.events() or () if event.device_type.name == "CUDA"
    ]
    return 1 - 1e-6 * covered([(span.start, span.end) for span in work]) / seconds


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, which may overlap."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def bytes_per_step(config: ModelConfig, context: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of weights and of KV that a pass over the full cache reads."""
    weights = weights_per_pass(config) * dtype.itemsize
    return weights, kv_bytes_per_token(config, dtype.itemsize) * context


def compare_dummies(
    config: ModelConfig,
    draft_config: ModelConfig | None,
    contexts: list[int],
    speculation: SpeculationConfig,
    generation: GenerationConfig,
    acceptance: tuple[float, float],
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
) -> dict[str, Any]:
    """Autoregressive decoding and the cascade behind each of several contexts, against measured copies."""
    log.info(
        "SYNTHETIC: random weights in the shape of %s, verdicts drawn at rates of %s",
        config.name,
        acceptance,
    )
    settings: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention}
    target = dummy_model(config, **settings)
    draft = dummy_model(draft_config, **settings) if draft_config else None
    memory, link = copy_bandwidth(device, from_host=False), copy_bandwidth(device, from_host=True)
    rows = []
    for context in contexts:
        with at_work(target):
            alone, together = (
                decode(
                    target,
                    draft,
                    context,
                    dataclasses.replace(speculation, method=method),
                    generation,
                    acceptance,
                )
                for method in ("autoregressive", speculation.method)
            )
        weights, kv = bytes_per_step(config, context, dtype)
        hosted = 1 - alone["on_chip"] / config.num_layers
        seconds = 1e-3 * alone["ms_per_step"]["median"]
        rows.append(
            {
                "context": context,
                "autoregressive": alone,
                "cascade": together,
                "speedup": alone["ms_per_token"] / together["ms_per_token"],
                "bytes_per_second": (weights + kv * (1 - hosted)) / seconds,
                "link_bytes_per_second": kv * hosted / seconds,
            }
        )
        log.info("%s", line(rows[-1], memory, link))
    return {
        "synthetic": True, "shape": config.name, "draft": draft_config.name if draft_config else "ngram",
        "acceptance": acceptance, "method": speculation.method, "plan": str(speculation.plans[0]),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device), "attention": attention_name(target.attend), "copy_bytes_per_second": memory,
        "host_copy_bytes_per_second": link, "rows": rows,
    }  # fmt: skip


def line(row: dict[str, Any], memory: float, link: float) -> str:
    """One context, for people."""
    alone, together = row["autoregressive"], row["cascade"]
    phases = ", ".join(f"{name} {ms:.2f}" for name, ms in together["phase_ms_per_token"].items())
    if together["idle_share"] is not None:
        phases += f"; the GPU is idle for {together['idle_share']:.0%}"
    return (
        f"{row['context']:8d} tokens: autoregressive {alone['ms_per_step']['median']:.2f} ms/token at "
        f"{row['bytes_per_second'] / 1e9:.1f} GB/s of memory ({row['bytes_per_second'] / memory:.0%} of a copy) and "
        f"{row['link_bytes_per_second'] / 1e9:.1f} over the link ({row['link_bytes_per_second'] / link:.0%}); cascade "
        f"{together['ms_per_token']:.2f} ms/token, {together['tokens_per_step']:.2f} tokens per step ({phases}); "
        f"speedup {row['speedup']:.2f}, synthetic"
    )


def draw_sweep(file: Path, result: dict[str, Any]) -> None:
    """The context sweep (the paper's figure 5) as a PNG."""
    from matplotlib import pyplot

    contexts = [row["context"] for row in result["rows"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    for method in ("autoregressive", "cascade"):
        left.plot(
            contexts,
            [row[method]["ms_per_token"] for row in result["rows"]],
            marker="o",
            label=method,
        )
    left.set_ylabel("ms/token")
    left.legend()
    right.plot(contexts, [row["speedup"] for row in result["rows"]], marker="o")
    right.set_ylabel("speedup over autoregressive")
    for axes in (left, right):
        axes.set_xlabel("context, tokens")
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"SYNTHETIC: {result['shape']}, {result['device']}, acceptance {result['acceptance']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
