"""The benchmark: prefill and decoding speed of a method, or of all methods in turns.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64 --method triforce

measures one method over several runs: medians with the range, and peak memory. `--compare` measures
the methods against one another instead. The last line of standard output is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import resource
    import sys
    from collections.abc import Callable, Sequence
    from typing import Any

    import torch

    from minitri.bench.compare import (
        SLACK,
        Result,
        StartPeer,
        check_on_chip,
        compare,
        spread,
        summarise,
        table,
    )
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import draft_name, where
    from minitri.cli.terminal import finish
    from minitri.engine import Engine
    from minitri.errors import InputError
    from minitri.generation import running
    from minitri.loading.prompts import as_seeds
    from minitri.settings import METHODS, GenerationConfig, SamplingParams, SpeculationConfig


def build_parser() -> arguments.OneLineParser:
    """The flags of the benchmark."""
    parser = arguments.OneLineParser(
        "bench",
        "--prompt-tokens 8000 --new-tokens 64 --method triforce",
        "--compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9",
        "--compare --sweep-tokens 2000 --sweep-tokens 8000 --method naive:16 --method auto",
        description="Measures prefill and decoding speed of one method or, with --compare, of "
        "several in turns.",
    )
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a measurement and of a comparison."""
    arguments.add_model_flags(parser)
    arguments.add_switches(parser, quiet="no progress or log on standard error")
    add, count = parser.add_argument, arguments.positive
    text = "UTF-8 text, or - for standard input; --compare takes several (default: Python's help)"
    add("--prompt-file", action="append", metavar="FILE", help=text)
    text, default = "tokens of the prompt", arguments.DEMO_PROMPT_TOKENS
    add("--prompt-tokens", type=count, default=default, metavar="N", help=text)
    options: dict[str, Any] = {"type": arguments.whole(4), "metavar": "N", "dest": "max_new_tokens"}
    add("--new-tokens", default=64, help="tokens to decode, at least 4", **options)
    add("--repeats", type=count, default=3, metavar="N", help="runs to measure")
    text = "or METHOD:TREE, as in naive:16 or triforce:4x3; --compare takes several (default: all, "
    text += "or autoregressive without --compare)"
    options = {"type": method_and_tree, "dest": "methods", "metavar": "METHOD"}
    add("--method", action="append", help=text, **options)
    group = parser.add_argument_group("--compare: every method, in turns, on the same prompts")
    arguments.add_switches(
        group,
        compare="measure the methods against one another instead",
        coupled="let all methods write the same text, so that none has better luck",
    )
    options = {"type": arguments.whole(1, 1000), "metavar": "N"}
    group.add_argument("--seeds", default=2, help="runs per prompt", **options)
    text = "in place of --prompt-tokens; may be given several times, for a comparison at each"
    group.add_argument("--sweep-tokens", type=count, action="append", metavar="N", help=text)
    group = parser.add_argument_group("speculation")
    arguments.add_draft_flag(group)
    arguments.add_size_flags(group)
    arguments.add_sampling_flags(parser)
    arguments.add_gpu_flags(parser)
    parser.set_defaults(method="auto", ignore_eos=True)


def method_and_tree(text: str) -> str:
    """A method, perhaps with a tree of guesses after a colon."""
    method, _, tree = text.partition(":")
    try:
        SpeculationConfig(method, tree=tree)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def contestants(settings: SpeculationConfig, names: Sequence[str]) -> dict[str, SpeculationConfig]:
    """The settings of every method that takes part."""
    methods = {}
    for name in dict.fromkeys(names):
        method, _, tree = name.partition(":")
        methods[name] = dataclasses.replace(settings, method=method, tree=tree or settings.tree)
    return methods


def check_alone(args: argparse.Namespace) -> None:
    """Raises `InputError` for flags that only a comparison takes."""
    several = [name for name in ("prompt_file", "methods") if len(getattr(args, name) or ()) > 1]
    given = [name for name in ("sweep_tokens", "coupled") if getattr(args, name)]
    for name in (*several, *given):
        flag = "method" if name == "methods" else name.replace("_", "-")
        amount = "several " if name in several else ""
        raise InputError(f"{amount}--{flag} needs --compare; add it, or leave --{flag} out")


def run_alone(args: argparse.Namespace) -> None:
    """Measures one method over several runs, and prints."""
    check_alone(args)
    [(name, speculation)] = contestants(
        arguments.taken(SpeculationConfig, args, timed=True), args.methods or ["autoregressive"]
    ).items()
    args.method = speculation.method
    generation, num_new = arguments.taken(GenerationConfig, args), args.max_new_tokens
    sampling = arguments.taken(SamplingParams, args)
    text = read_prompt(args.prompt_file[0] if args.prompt_file else None)
    kept = [(text, args.prompt_tokens)]
    engine, [prompt] = load_engine(args, arguments.draft_of(args), kept, num_new=num_new)
    settings: dict[str, Any] = {"sampling": sampling, "generation": generation}
    all_stats = []
    for seed in as_seeds(args.seed or 0, args.repeats):
        run = engine.generate(prompt, **settings, speculation=speculation, seed=seed)
        all_stats.append(finish(run, quiet=args.quiet).stats)
    facts = {
        "model": args.model,
        **where(engine.model),
        "method": name,
        "num_threads": torch.get_num_threads(),
        "num_prompt_tokens": len(prompt),
        "num_new_tokens": num_new,
        "prefill_seconds": spread([stats.prefill_seconds for stats in all_stats]),
        "ms_per_token": spread([stats.ms_per_token or 0.0 for stats in all_stats]),
        "peak_bytes": peak_memory_bytes(engine.model.device),
    }
    for key, unit in (("prefill_seconds", "s"), ("ms_per_token", "ms/token")):
        numbers = "{median:.1f} {unit} ({min:.1f} to {max:.1f})".format(unit=unit, **facts[key])
        print(f"{key.partition('_')[0]:10s}{numbers}")
    print(f"peak memory {facts['peak_bytes'] / 1e6:.0f} MB")
    print(json.dumps(facts))


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in use so far: of this process on CPU, of PyTorch's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_compare(
    args: argparse.Namespace,
    find_peers: Callable[[Engine], dict[str, StartPeer]] = lambda _: {},
) -> tuple[str, dict[int, Result]]:
    """Measures the methods against one another, for every length of the prompts, and prints.

    Returns what was compared, in a line, and the results by the length of the prompts.
    """
    texts = [read_prompt(file) for file in args.prompt_file or [None]]
    settings = arguments.taken(SpeculationConfig, args, timed=True)
    generation = arguments.taken(GenerationConfig, args)
    sampling = arguments.taken(SamplingParams, args)
    check_on_chip(generation)
    lengths, num_new = args.sweep_tokens or [args.prompt_tokens], generation.max_new_tokens
    kept = [(text, length) for length in lengths for text in texts]
    engine, prompts = load_engine(args, arguments.draft_of(args), kept, num_new=num_new + SLACK)
    methods = contestants(settings, ["autoregressive", *(args.methods or METHODS)])
    peers, results = find_peers(engine), {}
    for start in range(0, len(prompts), len(texts)):
        same_length = prompts[start : start + len(texts)]
        with running(engine.model):
            scores = compare(
                engine,
                same_length,
                methods,
                sampling=sampling,
                seeds=as_seeds(args.seed or 0, args.seeds),
                generation=generation,
                peers=peers,
            )
        results[max(map(len, same_length))] = result = summarise(scores, num_new)
        print_comparison(engine, args, same_length, result)
    return describe(engine, args), results


def print_comparison(
    engine: Engine, args: argparse.Namespace, prompts: list[list[int]], result: Result
) -> None:
    """The result after prompts of one length, as a table and as JSON."""
    lengths = list(map(len, prompts))
    title = f"{describe(engine, args)}, {max(lengths)} prompt tokens"
    print(f"{title}; {len(prompts)} prompts x {args.seeds} seeds: median (range)")
    print(table(result, args.max_new_tokens))
    flags = ("model", "temperature", "top_p", "coupled", "seeds")
    facts = {
        **{name: getattr(args, name) for name in flags},
        **where(engine.model),
        "draft": draft_name(engine),
        "num_prompt_tokens": lengths,
        "num_new_tokens": args.max_new_tokens,
        "contestants": result,
    }
    print(json.dumps(facts), flush=True)


def describe(engine: Engine, args: argparse.Namespace) -> str:
    """The setting of a comparison in one line."""
    return (
        f"{args.model}, {where(engine.model)['dtype']}, {engine.model.device}, "
        f"{args.max_new_tokens} new, T={args.temperature:g}, top-p {args.top_p:g}"
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.bench`."""
    with program(build_parser, argv) as args:
        if args.compare:
            run_compare(args)
        else:
            run_alone(args)
        sys.exit(0)


if __name__ == "__main__":
    main()
