"""The benchmark: what this machine could do, and what it does.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64

prints a card (weight bytes, KV bytes per token, measured memory bandwidth and the floor in ms/token
that follows from them), then prefill and decoding over several runs, medians with the spread, and
peak memory. `--profile` adds where the time of a decoding step goes; `--compare` measures the
methods against one another instead. The last line of standard output is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import sys
    from collections.abc import Sequence
    from typing import Any

    from minitri.benchmarks.compare import SLACK, check_on_chip, compare, summarise, table
    from minitri.benchmarks.floor import run_plain
    from minitri.benchmarks.peers.choice import PEERS, find_peers, peer_names, peer_python
    from minitri.benchmarks.plots import draw_contexts, draw_speedups, png_file
    from minitri.benchmarks.synthetic import add_synthetic_flags, run_synthetic
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import draft_name, where
    from minitri.engine import Engine
    from minitri.errors import InputError
    from minitri.generation import running
    from minitri.loading.fetch import locate
    from minitri.loading.prompts import as_seeds
    from minitri.settings import METHODS, GenerationConfig, SamplingParams, SpeculationConfig


COMPARE_ONLY = ("peers", "peer", "peer_python", "plot", "methods", "coupled", "sweep_tokens")
"""Settings of a comparison."""


def build_parser() -> arguments.OneLineParser:
    """The flags of the benchmark."""
    parser = arguments.OneLineParser(
        "bench",
        "--prompt-tokens 8000 --new-tokens 64 --repeats 3 --profile",
        "--compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9",
        "--compare --sweep-tokens 2000 --sweep-tokens 8000 --plot speed.png",
        description="Measures prefill and decoding speed against the floor that memory bandwidth "
        "sets, or, with\n--compare, the methods against one another.",
    )
    arguments.add_model_flags(parser)
    arguments.add_switches(
        parser,
        profile="say where the time of a decoding step goes",
        quiet="no progress or log on standard error",
    )
    add, count, demo = parser.add_argument, arguments.positive, arguments.DEMO_PROMPT_TOKENS
    text = "UTF-8 text, or - for standard input; --compare takes several (default: Python's help)"
    add("--prompt-file", action="append", metavar="FILE", help=text)
    add("--prompt-tokens", type=count, default=demo, metavar="N", help="tokens of the prompt")
    text, dest = "tokens to decode, at least 4", "max_new_tokens"
    add("--new-tokens", type=arguments.whole(4), default=64, metavar="N", dest=dest, help=text)
    add("--repeats", type=count, default=3, metavar="N", help="runs to measure")
    group = parser.add_argument_group("--compare: every method, in turns, on the same prompts")
    arguments.add_switches(
        group,
        compare="measure the methods against one another instead",
        peers="other programs take part: all of --peer that can run here",
        coupled="let all methods write the same text, so that none has better luck",
    )
    add = group.add_argument
    add("--seeds", type=arguments.whole(1, 1000), default=2, metavar="N", help="runs per prompt")
    text = "or METHOD:TREE, as in naive:16 or triforce:4x3; several times (default: all methods)"
    add("--method", type=method_and_tree, action="append", dest="methods", metavar="METHOD",
        help=text)  # fmt: skip
    text = "a peer, or all whose names begin so; may be given several times: " + ", ".join(PEERS)
    add("--peer", type=peer_names, action="extend", default=[], metavar="NAME", help=text)
    text = "the Python interpreter that has openvino-genai or llama-cpp-python, if not this one"
    add("--peer-python", type=peer_python, action="append", default=[], metavar="PROGRAM=PATH",
        help=text)  # fmt: skip
    text = "in place of --prompt-tokens; may be given several times, for a comparison at each"
    add("--sweep-tokens", type=count, action="append", metavar="N", help=text)
    text = "draw the speedups, or a sweep's ms/token, as a PNG"
    add("--plot", type=png_file, metavar="FILE", help=text)
    arguments.add_draft_flag(group)
    arguments.add_size_flags(group)
    arguments.add_sampling_flags(parser)
    add_synthetic_flags(parser)
    arguments.add_gpu_flags(parser)
    parser.set_defaults(method="auto", ignore_eos=True)
    return parser


def method_and_tree(text: str) -> str:
    """A method, perhaps with a tree of guesses behind a colon."""
    method, _, tree = text.partition(":")
    try:
        SpeculationConfig(method, tree=tree)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def contestants(settings: SpeculationConfig, names: Sequence[str]) -> dict[str, SpeculationConfig]:
    """The settings of every method that takes part."""
    pairs = {name: name.partition(":")[::2] for name in dict.fromkeys(["autoregressive", *names])}
    return {
        name: dataclasses.replace(settings, method=method, tree=tree or settings.tree)
        for name, (method, tree) in pairs.items()
    }


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    if args.load == "dummy":
        run_synthetic(args)
    elif args.compare:
        run_compare(args)
    elif len(args.prompt_file or []) > 1:
        raise InputError("several --prompt-file need --compare; give one")
    elif any(getattr(args, name) for name in COMPARE_ONLY):
        raise InputError(
            "--peers, --peer, --peer-python, --plot, --method, --sweep-tokens and --coupled need "
            "--compare; add it"
        )
    else:
        run_plain(args)


def run_compare(args: argparse.Namespace) -> None:
    """Measures the methods against one another, for every length of the prompts."""
    texts = [read_prompt(file) for file in args.prompt_file or [None]]
    settings = arguments.taken(SpeculationConfig, args, timed=True)
    generation = arguments.taken(GenerationConfig, args)
    sampling = arguments.taken(SamplingParams, args)
    seeds = as_seeds(args.seed or 0, args.seeds)
    check_on_chip(generation)
    lengths, num_new = args.sweep_tokens or [args.prompt_tokens], generation.max_new_tokens
    kept = [(text, length) for length in lengths for text in texts]
    engine, prompts = load_engine(args, arguments.draft_of(args), kept, num_new=num_new + SLACK)
    peers = find_peers(
        locate(args.model).path, engine, PEERS if args.peers else args.peer, dict(args.peer_python)
    )
    results = {}
    for start in range(0, len(prompts), len(texts)):
        same_length = prompts[start : start + len(texts)]
        with running(engine.model):
            scores = compare(
                engine, same_length, contestants(settings, args.methods or METHODS),
                sampling=sampling, seeds=seeds,
                generation=generation, peers=peers,
            )  # fmt: skip
        results[max(map(len, same_length))] = result = summarise(scores, num_new)
        print_comparison(engine, args, same_length, result)
    if args.plot and not args.sweep_tokens:
        draw_speedups(args.plot, result, describe(engine, args, f"{max(results)} prompt tokens, "))
    elif args.plot:
        contexts = sorted(results)
        times = {
            name: [results[context][name]["ms_per_token"]["median"] for context in contexts]
            for name in result
        }
        draw_contexts(args.plot, contexts, times, describe(engine, args))


def print_comparison(
    engine: Engine, args: argparse.Namespace, prompts: list[list[int]], result: dict[str, Any]
) -> None:
    """The result behind prompts of one length, as a table and as JSON."""
    lengths = list(map(len, prompts))
    title = describe(engine, args, f"{max(lengths)} prompt tokens, ")
    print(f"{title}; {len(prompts)} prompts x {args.seeds} seeds: median (range)")
    print(table(result, args.max_new_tokens))
    flags = ("model", "temperature", "top_p", "coupled", "seeds")
    facts = {
        **{name: getattr(args, name) for name in flags}, **where(engine.model),
        "draft": draft_name(engine), "num_prompt_tokens": lengths,
        "num_new_tokens": args.max_new_tokens, "contestants": result,
    }  # fmt: skip
    print(json.dumps(facts), flush=True)


def describe(engine: Engine, args: argparse.Namespace, prompt: str = "") -> str:
    """The setting of a comparison in one line."""
    return (
        f"{args.model}, {where(engine.model)['dtype']}, {engine.model.device}, {prompt}"
        f"{args.max_new_tokens} new, T={args.temperature:g}, top-p {args.top_p:g}"
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.bench`."""
    with program(build_parser, argv) as args:
        run_command(args)
        sys.exit(0)


if __name__ == "__main__":
    main()
