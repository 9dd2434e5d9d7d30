"""The benchmark: what this machine could do, and what it does.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64

prints a card (weight bytes, KV bytes per token, measured memory bandwidth and the floor in ms/token
that follows from them), then prefill and decoding over several runs, medians with the spread, and
peak memory. `--profile` adds where the time of a decoding step goes; `--compare` measures the
methods against one another instead. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from minitri.cli.exits import clean_exits, program

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    import torch

    from minitri.benchmarks.baselines import find_peers
    from minitri.benchmarks.compare import check_on_chip, compare, summarise, table
    from minitri.benchmarks.floor import run_plain
    from minitri.benchmarks.plots import draw_contexts, draw_speedups, plotter
    from minitri.benchmarks.synthetic import add_synthetic_flags, run_synthetic
    from minitri.cli import arguments
    from minitri.cli.prompts import encode_prompt, read_prompt
    from minitri.engine import Engine, load
    from minitri.errors import InputError
    from minitri.generation import running
    from minitri.loading.fetch import locate
    from minitri.settings import METHODS, SamplingParams


def build_parser() -> arguments.OneLineParser:
    """The flags of the benchmark."""
    start, shown, count = "  python -m minitri.bench", "(default: %(default)s)", arguments.positive
    parser = arguments.OneLineParser(
        prog="python -m minitri.bench",
        description="Measures prefill and decoding speed against the floor that memory bandwidth "
        "sets, or, with\n--compare, the methods against one another.",
        epilog=f"""examples:
{start} --prompt-tokens 8000 --new-tokens 64 --repeats 3 --profile
{start} --compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9
{start} --compare --sweep-tokens 2000 --sweep-tokens 8000 --plot speed.png""",
    )
    arguments.add_model_flags(parser)
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE",
        help="UTF-8 text; - is standard input (default: Python's help); with --compare it may be "
        "given several times",
    )  # fmt: skip
    group = parser.add_argument_group("--compare: every method, in turns, on the same prompts")
    for flags, name, text in (
        (parser, "profile", "say where the time of a decoding step goes"),
        (parser, "quiet", "no progress or log on standard error"),
        (group, "compare", "measure the methods against one another instead"),
        (group, "peers", "transformers and llama.cpp take part, as far as they are installed"),
        (group, "coupled", "let all methods write the same text, so that none has better luck"),
    ):
        flags.add_argument(f"--{name}", action="store_true", help=text)
    for flags, name, kind, default, text in (
        (parser, "prompt-tokens", count, arguments.DEMO_PROMPT_TOKENS, f"of the prompt {shown}"),
        (parser, "new-tokens", at_least_four, 64, f"to decode {shown}"),
        (parser, "repeats", count, 3, f"runs to measure {shown}"),
        (group, "seeds", count, 2, f"runs per prompt {shown}"),
    ):
        flags.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)
    group.add_argument(
        "--method", action="append", choices=METHODS,
        help="may be given several times (default: all of them)",
    )  # fmt: skip
    group.add_argument(
        "--sweep-tokens", type=count, action="append", metavar="N",
        help="in place of --prompt-tokens; may be given several times, for a comparison at each",
    )  # fmt: skip
    group.add_argument(
        "--plot", metavar="FILE", help="draw the speedups, or a sweep's ms/token, as a PNG"
    )
    arguments.add_draft_flag(group)
    arguments.add_size_flags(group)
    arguments.add_sampling_flags(parser)
    add_synthetic_flags(parser)
    arguments.add_gpu_flags(parser)
    return parser


def at_least_four(text: str) -> int:
    """A number of new tokens that leaves some to measure after the first and the warm-up."""
    if arguments.positive(text) < 4:
        raise argparse.ArgumentTypeError(
            f"{text} new tokens are too few to measure; ask for at least 4"
        )
    return int(text)


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    if args.load == "dummy":
        return run_synthetic(args)
    if args.compare:
        return run_compare(args)
    if len(args.prompt_file or []) > 1:
        raise InputError("several --prompt-file need --compare; give one")
    if args.peers or args.plot or args.method or args.coupled or args.sweep_tokens:
        raise InputError(
            "--peers, --plot, --method, --sweep-tokens and --coupled need --compare; add it"
        )
    return run_plain(args)


def run_compare(args: argparse.Namespace) -> int:
    """Measures the methods against one another, for every length of the prompts."""
    methods = list(dict.fromkeys(["autoregressive", *(args.method or METHODS)]))
    args.method, draw = "auto", draw_contexts if args.sweep_tokens else draw_speedups
    plot = plotter(Path(args.plot), draw) if args.plot else None
    texts = [read_prompt(file) for file in args.prompt_file or [None]]
    settings = dataclasses.replace(arguments.speculation_of(args), timed=True)
    sampling = arguments.taken(SamplingParams, args)
    generation = arguments.generation_of(args, args.new_tokens)
    check_on_chip(generation)
    engine = load(**arguments.model_of(args), draft=arguments.draft_of(args))
    peers = find_peers(locate(args.model).path, engine) if args.peers else None
    results = {}
    for length in args.sweep_tokens or [args.prompt_tokens]:
        prompts = [encode_prompt(engine, text, length) for text in texts]
        with running(engine.model):
            scores = compare(
                engine, prompts,
                {name: dataclasses.replace(settings, method=name) for name in methods},
                sampling=sampling, seeds=[(args.seed or 0) + i for i in range(args.seeds)],
                generation=generation, peers=peers,
            )  # fmt: skip
        results[max(map(len, prompts))] = result = summarise(scores, args.new_tokens)
        print_comparison(engine, args, prompts, result)
    if plot:
        prompt = "" if args.sweep_tokens else f"{max(results)} prompt tokens, "
        plot(results, describe(engine, args, prompt))
    return 0


def print_comparison(
    engine: Engine, args: argparse.Namespace, prompts: list[list[int]], result: dict[str, Any]
) -> None:
    """The result behind prompts of one length, as a table and as JSON."""
    lengths = list(map(len, prompts))
    title = describe(engine, args, f"{max(lengths)} prompt tokens, ")
    print(f"{title}; {len(prompts)} prompts x {args.seeds} seeds: median (range)")
    print(table(result, args.new_tokens))
    facts = {
        "model": args.model, "draft": engine.draft.config.name if engine.draft else "ngram",
        "dtype": str(engine.model.dtype).removeprefix("torch."), "num_prompt_tokens": lengths,
        "num_new_tokens": args.new_tokens,
        "temperature": args.temperature, "top_p": args.top_p, "coupled": args.coupled,
        "seeds": args.seeds, "torch": torch.__version__, "contestants": result,
    }  # fmt: skip
    print(json.dumps(facts), flush=True)


def describe(engine: Engine, args: argparse.Namespace, prompt: str) -> str:
    """The setting of a comparison in one line."""
    return (
        f"{args.model}, {str(engine.model.dtype).removeprefix('torch.')}, {engine.model.device}, "
        f"{prompt}{args.new_tokens} new, T={args.temperature:g}, top-p {args.top_p:g}"
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.bench`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
