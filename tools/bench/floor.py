"""Prefill and decoding of the model alone, next to the floor that memory bandwidth sets."""

import argparse
import json
from typing import Any

import torch

from minitri.apps.bench import spread
from minitri.apps.cli.arguments import taken
from minitri.apps.cli.boot import load_engine
from minitri.apps.cli.inputs import DEMO_PROMPT_TOKENS, read_prompt
from minitri.apps.cli.report import where
from minitri.core.generation import Generation
from minitri.core.roofline import bytes_per_pass
from minitri.core.settings import GenerationConfig, SpeculationConfig
from minitri.devices.cpu.kernels import load_kernels
from minitri.engine import Engine
from tools.bench.bandwidth import read_bandwidth


def run_floor(args: argparse.Namespace) -> None:
    """Measures the model alone and prints."""
    text = read_prompt(args.prompt_files[0] if args.prompt_files else None)
    num_new = args.max_new_tokens
    generation = taken(GenerationConfig, args)
    args.method = "autoregressive"
    engine, [prompt] = load_engine(args, text, usual_tokens=DEMO_PROMPT_TOKENS)
    all_stats = []
    for _ in range(args.repeats):
        run = plain_decoding(engine, prompt, generation)
        list(run)
        all_stats.append(run.stats)
    facts = card(engine, len(prompt) + num_new // 2)
    result: dict[str, Any] = {
        "model": args.model,
        **where(engine.model),
        "num_threads": torch.get_num_threads(),
        "num_prompt_tokens": len(prompt),
        "num_new_tokens": num_new,
        "repeats": args.repeats,
        **facts,
        "prefill_seconds": spread([stats.prefill_seconds for stats in all_stats]),
        "ms_per_token": spread([stats.ms_per_token or 0.0 for stats in all_stats]),
        "profile_ms": profile_decoding(engine, prompt, generation) if args.profile else None,
    }
    print(json.dumps(result) if args.json else describe(result))


def card(engine: Engine, num_tokens: int) -> dict[str, float]:
    """Bytes that a step must read after `num_tokens` tokens, and this machine's bandwidth."""
    model = engine.model
    weight_bytes = bytes_per_pass(model)
    kv_bytes = engine.config.kv_values_per_token * model.dtype.itemsize
    bandwidth = read_bandwidth(model.device)
    return {
        "weight_bytes": model.num_bytes,
        "weight_bytes_per_token": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "memory_bytes_per_second": bandwidth,
        "floor_ms_per_token": 1e3 * (weight_bytes + kv_bytes * num_tokens) / bandwidth,
    }


def plain_decoding(engine: Engine, prompt: list[int], generation: GenerationConfig) -> Generation:
    """A greedy run of the model alone, which reads the prompt from its start."""
    engine.release()
    alone = SpeculationConfig("autoregressive")
    return engine.generate(prompt, generation=generation, speculation=alone, seed=0, temperature=0)


def profile_decoding(
    engine: Engine, prompt: list[int], generation: GenerationConfig
) -> dict[str, float]:
    """Milliseconds per decoding step: those that the compiled kernels of a CPU count for parts of
    the layers, and all others, of which the LM head takes most."""
    seconds, kernels = torch.zeros(2, dtype=torch.float64), load_kernels()
    run = plain_decoding(engine, prompt, generation)
    num_steps = min(16, generation.max_new_tokens - 3)
    while run.stats.num_decoded_tokens < 2:
        next(run)
    before = run.stats.decode_seconds
    if kernels is not None:
        kernels.seconds = seconds
    while run.stats.num_decoded_tokens < 2 + num_steps:
        next(run)
    if kernels is not None:
        kernels.seconds = None
    total = 1e3 * (run.stats.decode_seconds - before) / num_steps
    run.close()
    linear, attention = (1e3 / num_steps * seconds).tolist()
    parts = {"linear layers": linear, "attention": attention}
    return {**parts, "LM head and others": total - linear - attention}


def describe(facts: dict[str, Any]) -> str:
    """The result for people."""

    def runs(key: str, unit: str) -> str:
        numbers = "{median:.1f} {unit} (of {count} runs: {min:.1f} to {max:.1f})"
        return numbers.format(unit=unit, count=facts["repeats"], **facts[key])

    prompt, prefill = facts["num_prompt_tokens"], facts["prefill_seconds"]["median"]
    floor, decode = facts["floor_ms_per_token"], facts["ms_per_token"]["median"]
    lines = [
        f"{facts['model']}, {facts['dtype']}, {facts['device']}, {facts['num_threads']} threads, "
        f"torch {facts['torch']}",
        f"prompt            {prompt} tokens, then {facts['num_new_tokens']} generated",
        f"weights           {facts['weight_bytes'] / 1e6:.0f} MB, of which "
        f"{facts['weight_bytes_per_token'] / 1e6:.0f} MB are read per token",
        f"KV cache          {facts['kv_bytes_per_token'] / 1e3:.1f} kB per token",
        f"memory bandwidth  {facts['memory_bytes_per_second'] / 1e9:.1f} GB/s, measured",
        f"floor             {floor:.1f} ms/token",
        f"prefill           {runs('prefill_seconds', 's')}, {prompt / prefill:.0f} tokens/s",
        f"decode            {runs('ms_per_token', 'ms/token')}, {decode / floor:.2f} x the floor",
    ]
    parts = facts["profile_ms"] or {}
    return "\n".join([*lines, *(f"  {part:20s} {ms:6.1f} ms/token" for part, ms in parts.items())])
