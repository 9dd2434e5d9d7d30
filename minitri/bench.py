"""The benchmark: what this machine could do, and what it does.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64

prints a card (weight bytes, KV bytes per token, measured memory bandwidth and the floor in ms/token that follows from
them), then prefill and decoding over several runs, medians with the spread, and peak memory. `--profile` adds where the
time of a decoding step goes. The last line of standard output is the same as one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
from pathlib import Path
from typing import Any

from minitri.errors import InputError
from minitri.cli.exits import clean_exits

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    import torch

    from minitri.benchmarks.bandwidth import read_bandwidth
    from minitri.benchmarks.compare import (
        check_on_chip,
        compare,
        draw_speedups,
        plotter,
        summarise,
        table,
    )
    from minitri.benchmarks.synthetic import add_dummy_flags, measure_shape
    from minitri.model.roofline import (
        Machine,
        kv_bytes_per_token,
        pass_seconds,
        weights_per_pass,
    )
    from minitri.engine import Engine, load
    from minitri.loading.fetch import locate
    from minitri.cli.arguments import (
        DEMO_PROMPT_TOKENS,
        OneLineParser,
        add_draft_flag,
        add_gpu_flags,
        add_model_flags,
        add_sampling_flags,
        add_size_flags,
        draft_of,
        generation_of,
        positive,
        speculation_of,
    )
    from minitri.generate import encode_prompt, finish, read_prompt, show_log
    from minitri.generation import Generation, at_work
    from minitri.benchmarks.baselines import find_peers
    from minitri.settings import METHODS, GenerationConfig, SamplingParams, SpeculationConfig
    from minitri.decoding.stats import spread

PARTS = {
    "linear layers": ("mkldnn::_linear_pointwise", "aten::addmm"),
    "attention, LM head": (
        "aten::bmm",
        "aten::mm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "attention, softmax": ("aten::exp_", "aten::sum"),
}
"""Kernels of a decoding step on CPU by what they are for; the rest, the profiler's own cost included, is `other`."""


def build_parser() -> OneLineParser:
    """The flags of the benchmark."""
    parser = OneLineParser(
        prog="python -m minitri.bench",
        description="Measures prefill and decoding speed against the floor that memory bandwidth sets, or, with "
        "--compare,\nthe methods against one another.",
        epilog="examples:\n  python -m minitri.bench --prompt-tokens 8000 --new-tokens 64 --repeats 3 --profile\n"
        "  python -m minitri.bench --compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="UTF-8 text; - is standard input (default: Python's "
        "help); with --compare it may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=DEMO_PROMPT_TOKENS,
        metavar="N",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens", type=at_least_four, default=64, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=3,
        metavar="N",
        help="runs to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="say where the time of a decoding step goes"
    )
    group = parser.add_argument_group(
        "--compare: every method, taking turns behind the same prompts"
    )
    group.add_argument(
        "--compare", action="store_true", help="measure the methods against one another instead"
    )
    group.add_argument(
        "--peers",
        action="store_true",
        help="let transformers and llama.cpp take part, as far as they are installed",
    )
    group.add_argument(
        "--seeds",
        type=positive,
        default=2,
        metavar="N",
        help="runs per prompt (default: %(default)s)",
    )
    group.add_argument(
        "--method",
        action="append",
        choices=METHODS,
        help="may be given several times (default: all of them)",
    )
    group.add_argument(
        "--coupled",
        action="store_true",
        help="let all methods write the same text, so that none has better luck",
    )
    group.add_argument("--plot", metavar="FILE", help="draw the speedups as a PNG")
    add_draft_flag(group)
    add_size_flags(group)
    add_sampling_flags(parser)
    add_dummy_flags(parser)
    add_gpu_flags(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress or log on standard error")
    parser.set_defaults(prompt=None, policy="retrieval")
    return parser


def at_least_four(text: str) -> int:
    """A number of new tokens that leaves some to measure after the first and the warm-up."""
    if positive(text) < 4:
        raise argparse.ArgumentTypeError(
            f"{text} new tokens are too few to measure; ask for at least 4"
        )
    return int(text)


def card(engine: Engine, num_tokens: int) -> dict[str, float]:
    """What a decoding step must read at a length of `num_tokens`, and how fast this machine reads."""
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
    return engine.generate(
        prompt, generation=generation, speculation=SpeculationConfig("autoregressive")
    )


def measure_once(
    engine: Engine, prompt: list[int], generation: GenerationConfig, *, quiet: bool
) -> tuple[float, float]:
    """Prefill seconds, and ms per decoded token, of one greedy run."""
    stats = finish(plain_decoding(engine, prompt, generation), quiet=quiet).stats
    assert stats.ms_per_token is not None
    return stats.prefill_seconds, stats.ms_per_token


def profile_decoding(
    engine: Engine, prompt: list[int], generation: GenerationConfig
) -> dict[str, float]:
    """Milliseconds per decoding step by part of the model; what is in no kernel counts as `other`."""
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
    kernels = {
        row.key: row.self_cpu_time_total / 1e3 / num_steps for row in recorded.key_averages()
    }
    parts = {part: sum(kernels.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    return {**parts, "other": total - sum(parts.values())}


def compare_methods(args: argparse.Namespace) -> int:
    """Measures the methods against one another, prints, returns the exit code."""
    methods = list(dict.fromkeys(["autoregressive", *(args.method or METHODS)]))
    files, args.method = args.prompt_file or [None], "auto"
    draw = plotter(Path(args.plot), draw_speedups) if args.plot else None
    texts = [read_prompt(argparse.Namespace(prompt=None, prompt_file=file)) for file in files]
    speculation, generation = speculation_of(args), generation_of(args, args.new_tokens)
    check_on_chip(generation)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
    engine = load(
        args.model, draft=draft_of(args), dtype=args.dtype, device=args.device, attention=args.attention,
        rope_scaling=args.rope_scaling, progress=not args.quiet,
    )  # fmt: skip
    prompts = [encode_prompt(engine, text, args.prompt_tokens) for text in texts]
    first = args.seed or 0
    with at_work(engine.model):
        scores = compare(
            engine, prompts, {name: dataclasses.replace(speculation, method=name, timed=True) for name in methods},
            sampling=sampling, seeds=range(first, first + args.seeds), generation=generation,
            peers=find_peers(locate(args.model).path, engine) if args.peers else None,
        )  # fmt: skip
    result = summarise(scores, args.new_tokens)
    title = (
        f"{args.model}, {str(engine.model.dtype).removeprefix('torch.')}, {engine.model.device}, "
        f"{max(map(len, prompts))} prompt tokens, {args.new_tokens} new, T={args.temperature:g}, top-p {args.top_p:g}"
    )
    print(
        f"{title}; {len(prompts)} prompts x {args.seeds} seeds: median (range)\n{table(result, args.new_tokens)}"
    )
    settings = {"model": args.model, "draft": engine.draft.config.name if engine.draft else "ngram"}
    settings |= {
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "num_prompt_tokens": list(map(len, prompts)),
    }
    settings |= {
        "num_new_tokens": args.new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
    }
    settings |= {"coupled": args.coupled}
    print(
        json.dumps(
            {**settings, "seeds": args.seeds, "torch": torch.__version__, "contestants": result}
        ),
        flush=True,
    )
    if draw:
        draw(result, title)
    return 0


def run_command(args: argparse.Namespace) -> int:
    """Measures, prints, returns the exit code."""
    if args.load == "dummy":
        return measure_shape(args)
    if args.compare:
        return compare_methods(args)
    if len(args.prompt_file or []) > 1:
        raise InputError("several --prompt-file need --compare; give one")
    if args.peers or args.plot or args.method or args.coupled:
        raise InputError("--peers, --plot, --method and --coupled need --compare; add it")
    args.prompt_file = args.prompt_file[0] if args.prompt_file else None
    bare_bytes = peak_memory_bytes(torch.device("cpu"))
    engine = load(
        args.model, draft="ngram", dtype=args.dtype, device=args.device, attention=args.attention,
        rope_scaling=args.rope_scaling, progress=not args.quiet,
    )  # fmt: skip
    prompt = encode_prompt(engine, read_prompt(args), args.prompt_tokens)
    device = engine.model.device
    generation = generation_of(args, args.new_tokens)
    prefill, decode = zip(
        *(measure_once(engine, prompt, generation, quiet=args.quiet) for _ in range(args.repeats)),
        strict=True,
    )
    peak_bytes = peak_memory_bytes(device) - (0 if device.type == "cuda" else bare_bytes)
    parts = profile_decoding(engine, prompt, generation) if args.profile else None
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
        return f"{values['median']:.1f} {unit} (of {result['repeats']} runs: {values['min']:.1f} to {values['max']:.1f})"

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
