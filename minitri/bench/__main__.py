"""The benchmark: prefill and decoding speed of a method, or of all methods in turns.

Prints a table of medians with the range over prompts and seeds, or with --json one JSON object.
Every prompt is read once, cold; what a method reads again after that is added to its figure.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    from collections.abc import Callable, Sequence
    from typing import TYPE_CHECKING

    from minitri import (
        GenerationConfig,
        InputError,
        Request,
        SamplingParams,
        SpeculationConfig,
    )
    from minitri.bench.compare import Run, compare, conclusion, summarise, table
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import where
    from minitri.fields import between
    from minitri.loading.prompt_ids import as_seeds
    from minitri.settings import METHODS

    if TYPE_CHECKING:
        from minitri import Engine


@dataclasses.dataclass(frozen=True)
class BenchFlags:
    """What this program alone is asked for."""

    compare: bool = False
    """All methods, or those of --method, in turns."""
    prompt_file: Sequence[str] = ()
    """UTF-8 text, or -, standard input; may be given several times. Default: Python's help."""
    seeds: int = between(2, 1, 1000)
    """Runs per prompt."""
    json: bool = False
    """Print one JSON object instead of the table."""


def build_parser() -> arguments.OneLineParser:
    """The flags of the benchmark."""
    parser = arguments.OneLineParser(
        "bench",
        "--prompt-tokens 8000 --new-tokens 64 --method triforce",
        "--compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9",
        description="Prefill and decoding speed of a method or, with --compare, of all in turns.",
    )
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured, and on which prompts."""
    arguments.add_flags(parser, *arguments.MODEL, "coupled")
    arguments.add_fields(parser, BenchFlags)
    add = parser.add_argument
    text = "or METHOD:TREE, as in naive:16 or triforce:4x3; several times (default: auto, or all)"
    add("--method", action="append", dest="methods", metavar="METHOD", default=[], help=text)
    for name, dest, least, default, text in (
        ("prompt", "max_prompt_tokens", 1, arguments.DEMO_PROMPT_TOKENS, "of each prompt"),
        ("new", "max_new_tokens", 4, 64, "tokens to generate, at least 4"),
    ):
        kind = arguments.whole(least)
        add(f"--{name}-tokens", dest=dest, type=kind, metavar="N", default=default, help=text)
    arguments.add_flags(parser, "draft", *arguments.SIZES, title="speculation")
    arguments.add_flags(parser, *arguments.SAMPLING, "seed", title="sampling")
    arguments.add_flags(parser, *arguments.MEMORY)
    parser.set_defaults(method="auto", ignore_eos=True)


def speculations_of(args: argparse.Namespace) -> dict[str, SpeculationConfig]:
    """The settings of every METHOD or METHOD:TREE that takes part, by its name."""
    settings = arguments.taken(SpeculationConfig, args, timed=True)
    names = args.methods or (METHODS if args.compare else ["auto"])
    methods = {}
    for name in ["autoregressive", *names] if args.compare else names:
        method, _, tree = name.partition(":")
        methods[name] = dataclasses.replace(settings, method=method, tree=tree or settings.tree)
    return methods


def measure(
    args: argparse.Namespace,
    find_others: "Callable[[Engine], dict[str, Callable[[Request], Run]]]" = lambda _: {},
) -> None:
    """Measures what the flags name, and other programs, and prints. Raises `InputError`."""
    texts = [read_prompt(file) for file in args.prompt_file or [None]]
    speculations = speculations_of(args)
    generation = arguments.taken(GenerationConfig, args)
    sampling = arguments.taken(SamplingParams, args)
    seeds = as_seeds(args.seed or 0, args.seeds)
    if args.offload and args.on_chip is None:
        raise InputError("--offload needs --on-chip N here, the same for all methods")
    engine, prompts = load_engine(args, texts)
    requests = [Request(it, sampling=sampling, generation=generation) for it in prompts]
    result = summarise(compare(engine, requests, seeds, speculations, find_others(engine)))
    facts = where(engine.model)
    lengths = [len(prompt) for prompt in prompts]
    if args.json:
        report = {name: getattr(args, name) for name in ("model", "coupled", "seeds")}
        report |= {**vars(sampling), **facts, "max_new_tokens": args.max_new_tokens}
        report |= {"draft": engine.models.drafter_name, "num_prompt_tokens": lengths}
        print(json.dumps({**report, "contestants": result}), flush=True)
        return
    print(
        f"{args.model}, {facts['dtype']}, {facts['device']}, {facts['attention']}; temperature "
        f"{args.temperature:g}; {args.seeds} seeds; prompts of {', '.join(map(str, lengths))} "
        f"tokens, read cold\nmedians (ranges) of {args.max_new_tokens} new tokens; accepted: "
        f"shares of tested guesses, the target's last\n\n{table(result)}\n\n{conclusion(result)}"
    )


main = program(build_parser, measure)

if __name__ == "__main__":
    main()
