"""The benchmark: what this machine could do, and what it does.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64

prints a card (weight bytes, KV bytes per token, measured memory bandwidth and the floor in ms/token that follows from
them), then prefill and decoding over several runs, medians with the spread, and peak memory. `--profile` adds where the
time of a decoding step goes. The last line of standard output is the same as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from typing import Any

from minitri.exits import clean_exits

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    import torch

    from minitri.engine import Engine, load
    from minitri.flags import DEMO_PROMPT_TOKENS, OneLineParser, add_model_flags, positive
    from minitri.generate import encode_prompt, finish, read_prompt, show_log
    from minitri.settings import GenerationConfig

PARTS = {
    "linear layers": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::bmm"),
    "attention, matmuls": ("aten::mm", "aten::_embedding_bag_forward_only"),
    "attention, softmax": ("aten::_softmax",),
}
"""Kernels of a decoding step on CPU by what they are for; the rest, the profiler's own cost included, is `other`."""


def build_parser() -> OneLineParser:
    """The flags of the benchmark."""
    parser = OneLineParser(
        prog="python -m minitri.bench",
        description="Measures prefill and decoding speed against the floor that memory bandwidth sets.",
        epilog="example:\n  python -m minitri.bench --prompt-tokens 8000 --new-tokens 64 --repeats 3 --profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8 text; - is standard input (default: Python's help)"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=DEMO_PROMPT_TOKENS, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--new-tokens", type=at_least_four, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="runs to measure (default: %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="say where the time of a decoding step goes")
    parser.add_argument("--quiet", action="store_true", help="no progress or log on standard error")
    parser.set_defaults(prompt=None)
    return parser


def at_least_four(text: str) -> int:
    """A number of new tokens that leaves some to measure after the first and the warm-up."""
    if positive(text) < 4:
        raise argparse.ArgumentTypeError(f"{text} new tokens are too few to measure; ask for at least 4")
    return int(text)


def measure_bandwidth(device: torch.device, repeats: int = 7) -> float:
    """Bytes per second at which a large tensor is read once, the median of several tries."""
    data = torch.ones(1 << 26, device=device)  # 256 MiB, far beyond any cache
    rates = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        data.sum()
        synchronize(device)
        rates.append(data.numel() * data.element_size() / (time.perf_counter() - started))
    return statistics.median(rates)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def card(engine: Engine, num_tokens: int) -> dict[str, float]:
    """What a decoding step must read at a length of `num_tokens`, and how fast this machine reads."""
    model, config = engine.model, engine.config
    untied_embedding = (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * model.dtype.itemsize
    )
    weight_bytes = model.num_bytes - untied_embedding  # one row of an untied table is read, not the table
    kv_bytes = config.kv_values_per_token * model.dtype.itemsize
    bandwidth = measure_bandwidth(model.device)
    return {
        "weight_bytes": model.num_bytes,
        "weight_bytes_per_token": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "memory_bytes_per_second": bandwidth,
        "floor_ms_per_token": 1e3 * (weight_bytes + kv_bytes * num_tokens) / bandwidth,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in use so far: of this process on CPU, of PyTorch's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_once(engine: Engine, prompt: list[int], num_new: int, *, quiet: bool) -> tuple[float, float]:
    """Prefill seconds, and ms per decoded token, of one greedy run."""
    run = engine.generate(prompt, generation=GenerationConfig(max_new_tokens=num_new, ignore_eos=True))
    stats = finish(run, quiet=quiet).stats
    assert stats.ms_per_token is not None
    return stats.prefill_seconds, stats.ms_per_token


def profile_decoding(engine: Engine, prompt: list[int], num_new: int) -> dict[str, float]:
    """Milliseconds per decoding step by part of the model; what is in no kernel counts as `other`."""
    from torch.profiler import ProfilerActivity, profile

    run = engine.generate(prompt, generation=GenerationConfig(max_new_tokens=num_new, ignore_eos=True))
    num_steps = min(16, num_new - 3)
    while run.stats.num_decoded_tokens < 2:
        next(run)
    before = run.stats.decode_seconds
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        while run.stats.num_decoded_tokens < 2 + num_steps:
            next(run)
    total = 1e3 * (run.stats.decode_seconds - before) / num_steps
    run.close()
    kernels = {row.key: row.self_cpu_time_total / 1e3 / num_steps for row in recorded.key_averages()}
    parts = {part: sum(kernels.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    return {**parts, "other": total - sum(parts.values())}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def run_command(args: argparse.Namespace) -> int:
    """Measures, prints, returns the exit code."""
    bare_bytes = peak_memory_bytes(torch.device("cpu"))
    engine = load(
        args.model, dtype=args.dtype, device=args.device, rope_scaling=args.rope_scaling, progress=not args.quiet
    )
    prompt = encode_prompt(engine, read_prompt(args), args.prompt_tokens)
    device = engine.model.device
    prefill, decode = zip(
        *(measure_once(engine, prompt, args.new_tokens, quiet=args.quiet) for _ in range(args.repeats)), strict=True
    )
    peak_bytes = peak_memory_bytes(device) - (0 if device.type == "cuda" else bare_bytes)
    parts = profile_decoding(engine, prompt, args.new_tokens) if args.profile else None
    facts = card(engine, len(prompt) + args.new_tokens // 2)
    kv_bytes = int(facts["kv_bytes_per_token"]) * (len(prompt) + args.new_tokens)
    result: dict[str, Any] = {
        "model": args.model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(device),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "num_prompt_tokens": len(prompt),
        "num_new_tokens": args.new_tokens,
        "repeats": args.repeats,
        **facts,
        "prefill_seconds": spread(list(prefill)),
        "ms_per_token": spread(list(decode)),
        "peak_bytes": peak_bytes,
        "weights_and_kv_bytes": engine.model.num_bytes + kv_bytes,
        "profile_ms": parts,
    }
    print(describe(result))
    print(json.dumps(result))
    return 0


def describe(result: dict[str, Any]) -> str:
    """The result for people."""

    def median(key: str, unit: str) -> str:
        values = result[key]
        return (
            f"{values['median']:.1f} {unit} (of {result['repeats']} runs: {values['min']:.1f} to {values['max']:.1f})"
        )

    floor, decode = result["floor_ms_per_token"], result["ms_per_token"]["median"]
    rate = result["num_prompt_tokens"] / result["prefill_seconds"]["median"]
    memory, needed = result["peak_bytes"], result["weights_and_kv_bytes"]
    lines = [
        f"{result['model']}, {result['dtype']}, {result['device']}, {result['num_threads']} threads, "
        f"torch {result['torch']}",
        f"prompt            {result['num_prompt_tokens']} tokens, then {result['num_new_tokens']} generated",
        f"weights           {result['weight_bytes'] / 1e6:.0f} MB, of which "
        f"{result['weight_bytes_per_token'] / 1e6:.0f} MB are read per token",
        f"KV cache          {result['kv_bytes_per_token'] / 1e3:.1f} kB per token",
        f"memory bandwidth  {result['memory_bytes_per_second'] / 1e9:.1f} GB/s, measured",
        f"floor             {floor:.1f} ms/token",
        f"prefill           {median('prefill_seconds', 's')}, {rate:.0f} tokens/s",
        f"decode            {median('ms_per_token', 'ms/token')}, {decode / floor:.2f} x the floor",
        f"peak memory       {memory / 1e6:.0f} MB above the imports, {memory / needed:.2f} x weights + KV cache "
        f"({needed / 1e6:.0f} MB)",
    ]
    if result["profile_ms"]:
        lines += [f"  {part:20s} {ms:6.1f} ms/token" for part, ms in result["profile_ms"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.bench`."""
    with clean_exits():
        args = build_parser().parse_args(argv)
        show_log(quiet=args.quiet)
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
