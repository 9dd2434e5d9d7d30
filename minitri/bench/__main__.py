"""The benchmark: prefill and decoding speed of a method, or of all methods in turns.

    python -m minitri.bench --prompt-tokens 8000 --new-tokens 64 --method triforce
    python -m minitri.bench --compare

Prints medians with the range over prompts and seeds; the last line of standard output is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import resource
    import sys
    from collections.abc import Callable
    from typing import Any

    import torch

    from minitri.bench.compare import SLACK, Result, StartPeer, compare, summarise, table
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import where
    from minitri.engine import Engine
    from minitri.errors import InputError
    from minitri.generation import running
    from minitri.loading.prompt_ids import as_seeds
    from minitri.requests import Request
    from minitri.settings import METHODS, GenerationConfig, SamplingParams, SpeculationConfig


def build_parser() -> arguments.OneLineParser:
    """The flags of the benchmark."""
    parser = arguments.OneLineParser(
        "bench",
        "--prompt-tokens 8000 --new-tokens 64 --method triforce",
        "--compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6 --top-p 0.9",
        "--compare --sweep-tokens 2000 --sweep-tokens 8000 --method naive:16 --method auto",
        description="Measures prefill and decoding speed of a method or, with --compare, of all "
        "methods in turns.",
    )
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured, and on which prompts."""
    arguments.add_model_flags(parser)
    arguments.add_switches(
        parser,
        compare="measure all methods, or those of --method, against autoregressive decoding",
        coupled="let all methods write the same text, so that none has better luck",
        quiet="no progress or log on standard error",
    )
    add = parser.add_argument
    count = arguments.positive
    text = "or METHOD:TREE, as in naive:16 or triforce:4x3; several times (default: auto, or all)"
    options: dict[str, Any] = {"dest": "methods", "metavar": "METHOD", "default": []}
    add("--method", type=method_and_tree, action="append", help=text, **options)
    text = "UTF-8 text, or -, standard input; may be given several times (default: Python's help)"
    add("--prompt-file", action="append", metavar="FILE", help=text)
    text = "tokens of each prompt"
    default = arguments.DEMO_PROMPT_TOKENS
    add("--prompt-tokens", type=count, default=default, metavar="N", help=text)
    text = "in place of --prompt-tokens; may be given several times, for a measurement at each"
    add("--sweep-tokens", type=count, action="append", metavar="N", help=text)
    options = {"type": arguments.whole(4), "metavar": "N", "dest": "max_new_tokens"}
    add("--new-tokens", default=64, help="tokens to decode, at least 4", **options)
    options = {"type": arguments.whole(1, 1000), "metavar": "N"}
    add("--seeds", default=2, help="runs per prompt", **options)
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


def contestants(args: argparse.Namespace) -> dict[str, SpeculationConfig]:
    """The settings of every method that takes part, by its name."""
    settings = arguments.taken(SpeculationConfig, args, timed=True)
    names = args.methods or ["auto"]
    if args.compare:
        names = ["autoregressive", *(args.methods or METHODS)]
    methods = {}
    for name in dict.fromkeys(names):
        method, _, tree = name.partition(":")
        methods[name] = dataclasses.replace(settings, method=method, tree=tree or settings.tree)
    return methods


def measure(
    args: argparse.Namespace, find_peers: Callable[[Engine], dict[str, StartPeer]] = lambda _: {}
) -> tuple[str, dict[int, Result]]:
    """Measures what the flags name at every length of the prompts, and prints. Raises `InputError`.

    Returns what was measured, in a line, and the results by the length of the prompts.
    """
    texts = [read_prompt(file) for file in args.prompt_file or [None]]
    methods = contestants(args)
    generation = arguments.taken(GenerationConfig, args)
    sampling = arguments.taken(SamplingParams, args)
    num_new = args.max_new_tokens
    seeds = as_seeds(args.seed or 0, args.seeds)
    if args.offload and args.on_chip is None:
        raise InputError(
            "--offload needs --on-chip N here, so that all methods keep as many layers on the GPU"
        )
    lengths = args.sweep_tokens or [args.prompt_tokens]
    kept = [(text, length) for length in lengths for text in texts]
    engine, prompts = load_engine(args, arguments.draft_of(args), kept, num_new=num_new + SLACK)
    title = (
        f"{args.model}, {where(engine.model)['dtype']}, {engine.model.device}, "
        f"{num_new} new, T={args.temperature:g}, top-p {args.top_p:g}"
    )
    peers = find_peers(engine)
    results = {}
    for start in range(0, len(prompts), len(texts)):
        same_length = prompts[start : start + len(texts)]
        requests = [Request(it, sampling=sampling, generation=generation) for it in same_length]
        with running(engine.models):
            done = compare(engine, requests, seeds, methods, peers)
        longest = max(map(len, same_length))
        result = summarise(done, num_new)
        results[longest] = result
        count = f"{len(same_length)} prompts x {args.seeds} seeds"
        print(f"{title}, {longest} prompt tokens; {count}: median (range)")
        print(table(result, num_new))
        facts = {name: getattr(args, name) for name in ("model", "temperature", "top_p", "coupled")}
        facts |= {**where(engine.model), "draft": engine.drafter_name, "seeds": args.seeds}
        facts |= {"num_prompt_tokens": list(map(len, same_length)), "num_new_tokens": num_new}
        facts |= {"peak_bytes": peak_memory_bytes(engine.model.device), "contestants": result}
        print(json.dumps(facts), flush=True)
    return title, results


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in use so far: of this process on CPU, of PyTorch's allocator on CUDA."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.bench`."""
    with program(build_parser, argv) as args:
        measure(args)
        sys.exit(0)


if __name__ == "__main__":
    main()
