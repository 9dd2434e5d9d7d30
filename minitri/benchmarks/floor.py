"""Prefill and decoding of the model alone, beside the floor that memory bandwidth sets."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from typing import Any

import torch

from minitri.benchmarks.bandwidth import read_bandwidth
from minitri.benchmarks.compare import spread
from minitri.cli.arguments import generation_of, model_of
from minitri.cli.prompts import encode_prompt, read_prompt
from minitri.cli.terminal import finish
from minitri.engine import Engine, load
from minitri.generation import Generation
from minitri.roofline import Machine, kv_bytes_per_token, pass_seconds, weights_per_pass
from minitri.settings import GenerationConfig, SpeculationConfig

PARTS = {
    "linear layers": ("mkldnn::_linear_pointwise", "aten::addmm"),
    "attention, LM head": (
        "aten::bmm", "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "attention, softmax": ("aten::exp_", "aten::sum"),
}  # fmt: skip
"""Kernels of a decoding step on CPU by what they are for; the rest, profiling included: `other`."""


def run_plain(args: argparse.Namespace) -> int:
    """Measures the model alone, prints, returns the exit code."""
    bare_bytes = peak_memory_bytes(torch.device("cpu"))
    text = read_prompt(args.prompt_file[0] if args.prompt_file else None)
    engine = load(**model_of(args), draft="ngram")
    prompt, device = encode_prompt(engine, text, args.prompt_tokens), engine.model.device
    generation = generation_of(args, args.new_tokens)
    all_stats = [
        finish(plain_decoding(engine, prompt, generation), quiet=args.quiet).stats
        for _ in range(args.repeats)
    ]
    peak_bytes = peak_memory_bytes(device) - (0 if device.type == "cuda" else bare_bytes)
    facts = card(engine, len(prompt) + args.new_tokens // 2)
    kv_bytes = int(facts["kv_bytes_per_token"]) * (len(prompt) + args.new_tokens)
    result: dict[str, Any] = {
        "model": args.model, "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(device), "num_threads": torch.get_num_threads(), "torch": torch.__version__,
        "num_prompt_tokens": len(prompt), "num_new_tokens": args.new_tokens,
        "repeats": args.repeats, **facts,
        "prefill_seconds": spread([stats.prefill_seconds for stats in all_stats]),
        "ms_per_token": spread([stats.ms_per_token or 0.0 for stats in all_stats]),
        "peak_bytes": peak_bytes, "weights_and_kv_bytes": engine.model.num_bytes + kv_bytes,
        "profile_ms": profile_decoding(engine, prompt, generation) if args.profile else None,
    }  # fmt: skip
    print(describe(result))
    print(json.dumps(result))
    return 0


def card(engine: Engine, num_tokens: int) -> dict[str, float]:
    """What a step must read at a length of `num_tokens`, and how fast this machine reads."""
    model, config = engine.model, engine.config
    weight_bytes = weights_per_pass(config) * model.dtype.itemsize
    kv_bytes = kv_bytes_per_token(config, model.dtype.itemsize)
    bandwidth = read_bandwidth(model.device)
    machine = Machine(bandwidth, bandwidth, bandwidth)
    floor = pass_seconds(machine, config, weight_bytes=weight_bytes, kv_bytes=kv_bytes * num_tokens)
    return {
        "weight_bytes": model.num_bytes,
        "weight_bytes_per_token": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "memory_bytes_per_second": bandwidth,
        "floor_ms_per_token": 1e3 * floor,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in use so far: of this process on CPU, of PyTorch's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def plain_decoding(engine: Engine, prompt: list[int], generation: GenerationConfig) -> Generation:
    """A greedy run of the model alone."""
    alone = SpeculationConfig("autoregressive")
    return engine.generate(prompt, generation=generation, speculation=alone)


def profile_decoding(
    engine: Engine, prompt: list[int], generation: GenerationConfig
) -> dict[str, float]:
    """Milliseconds per decoding step by part of the model; what is in no kernel is `other`."""
    from torch.profiler import ProfilerActivity, profile

    run = plain_decoding(engine, prompt, generation)
    num_steps = min(16, generation.max_new_tokens - 3)
    while run.stats.num_decoded_tokens < 2:
        next(run)
    before = run.stats.decode_seconds
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        while run.stats.num_decoded_tokens < 2 + num_steps:
            next(run)
    total = 1e3 * (run.stats.decode_seconds - before) / num_steps
    run.close()
    rows = recorded.key_averages()
    kernels = {row.key: row.self_cpu_time_total / 1e3 / num_steps for row in rows}
    parts = {part: sum(kernels.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    return {**parts, "other": total - sum(parts.values())}


def describe(result: dict[str, Any]) -> str:
    """The result for people."""

    def median(key: str, unit: str) -> str:
        numbers = "{median:.1f} {0} (of {1} runs: {min:.1f} to {max:.1f})"
        return numbers.format(unit, result["repeats"], **result[key])

    facts = {key: value for key, value in result.items() if isinstance(value, int | float)}
    floor, decode = result["floor_ms_per_token"], result["ms_per_token"]["median"]
    rate = facts["num_prompt_tokens"] / result["prefill_seconds"]["median"]
    memory, needed = facts["peak_bytes"], facts["weights_and_kv_bytes"]
    lines = [
        f"{result['model']}, {result['dtype']}, {result['device']}, "
        f"{facts['num_threads']} threads, torch {result['torch']}",
        f"prompt            {facts['num_prompt_tokens']} tokens, then {facts['num_new_tokens']} "
        "generated",
        f"weights           {facts['weight_bytes'] / 1e6:.0f} MB, of which "
        f"{facts['weight_bytes_per_token'] / 1e6:.0f} MB are read per token",
        f"KV cache          {facts['kv_bytes_per_token'] / 1e3:.1f} kB per token",
        f"memory bandwidth  {facts['memory_bytes_per_second'] / 1e9:.1f} GB/s, measured",
        f"floor             {floor:.1f} ms/token",
        f"prefill           {median('prefill_seconds', 's')}, {rate:.0f} tokens/s",
        f"decode            {median('ms_per_token', 'ms/token')}, {decode / floor:.2f} x the floor",
        f"peak memory       {memory / 1e6:.0f} MB above the imports, {memory / needed:.2f} x "
        f"weights + KV cache ({needed / 1e6:.0f} MB)",
    ]
    if result["profile_ms"]:
        lines += [f"  {part:20s} {ms:6.1f} ms/token" for part, ms in result["profile_ms"].items()]
    return "\n".join(lines)
