"""The benchmark: prefill and decoding speed of methods on this machine, interleaved.

    python -m tools.bench compare --prompt-file a.txt --prompt-file b.txt --temperature 0.6
    python -m tools.bench methods --max-prompt-tokens 8000 --method triforce

`compare` measures autoregressive decoding and all methods, or those of --method, and speedups;
`methods` those of --method alone, or auto. With --row both print rows for docs/machines.md.

Every prompt is read once, cold; tokens that a method reads again are added to its prefill time.
Runs are interleaved, each round in another order, so that a drifting machine is as slow for all.
"""

import argparse
import dataclasses
import functools
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import minitri
from minitri import GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig, Stats
from minitri.apps.cli import arguments, boot, exits, inputs, report
from minitri.core.log import log
from minitri.core.settings import METHODS
from minitri.text.prompt_ids import as_seeds

TIMES = """{:16}{prefill_seconds[median]:8.2f} s prefill, {ms_per_token[median]:7.1f} ms/token \
({ms_per_token[min]:.1f} to {ms_per_token[max]:.1f})"""
SPEEDUP = ", {speedup[median]:.2f} times as fast ({speedup[min]:.2f} to {speedup[max]:.2f})"


class Run(NamedTuple):
    """Figures of one run of a method: one prompt, one seed."""

    prefill_seconds: float
    ms_per_token: float
    stats: Stats


def build_parser(name: str) -> arguments.OneLineParser:
    """Flags of `compare` or `methods`."""
    settings = {"prog": f"python -m tools.bench {name}", "usage": "%(prog)s [flags]"}
    parser = arguments.OneLineParser(description=__doc__, **settings)
    parser.add_flags("MODEL", "json", "MEMORY", "coupled", "LENGTH")
    add = parser.add_argument
    add("--row", metavar="NAME", help="name of this machine: prints rows, of auto or each --method")
    text = "runs per prompt (default: 2)"
    add("--seeds", type=arguments.number_from(1, 1000), default=2, metavar="N", help=text)
    several: dict[str, Any] = {"action": "append", "default": []}
    text = "a text; may be given several times (default: Python's help)"
    add("--prompt-file", **several, dest="prompt_files", metavar="FILE", help=text)
    text = "or METHOD:TREE, as in naive:16 or triforce:4x3; may be given several times"
    add("--method", **several, dest="methods", metavar="METHOD", help=text)
    parser.add_flags("SIZES", title="speculation")
    parser.add_flags("SAMPLING", "seed", title="greedy")
    parser.set_defaults(compare=name == "compare", ignore_eos=True, max_new_tokens=64)
    return parser


def measure(args: argparse.Namespace) -> None:
    """Measures the methods that the flags name, and prints figures. Raises `InputError`."""
    texts = [inputs.read_prompt(file) for file in args.prompt_files or [None]]
    names = args.methods or (METHODS if args.compare else ["auto"])
    if args.compare or args.row is not None:
        names = ["autoregressive", *names]
    speculations = {}
    for name in names:
        method, _, tree = name.partition(":")
        speculations[name] = arguments.taken(
            SpeculationConfig, args, timed=True, method=method, tree=tree or args.tree
        )
    generation = arguments.taken(GenerationConfig, args)
    sampling = arguments.taken(SamplingParams, args)
    seeds = as_seeds(args.seed or 0, args.seeds)
    if args.max_new_tokens < 4:
        raise InputError(f"--max-new-tokens is {args.max_new_tokens}; give at least 4 to measure")
    if args.offload and args.on_chip is None:
        raise InputError("--offload needs --on-chip N here, the same for all methods")
    engine, prompts = boot.load_engine(args, *texts, usual_tokens=inputs.DEMO_PROMPT_TOKENS)
    requests = [Request(ids, sampling=sampling, generation=generation) for ids in prompts]
    result = summarise(compare(engine, requests, seeds, speculations))
    facts = {
        **{name: vars(args)[name] for name in ("model", "coupled", "seeds", "max_new_tokens")},
        **vars(sampling),
        **report.where(engine.model),
        "draft": engine.models.drafter_name,
        "num_prompt_tokens": [*map(len, prompts)],
    }
    if args.json:
        print(json.dumps({**facts, "contestants": result}), flush=True)
    elif args.row is not None:
        for name in args.methods or ["auto"]:
            row = result[name]
            print(
                f"| {args.row} | {args.model} | {engine.model.num_bytes / 1e6:,.0f} MB "
                f"| {', '.join(f'{len(ids):,}' for ids in prompts)} "
                f"| {result['autoregressive']['ms_per_token']['median']:.1f} "
                f"| {row['ms_per_token']['median']:.1f} by {name} "
                f"| {1 - 1 / row['tokens_per_step']:.0%} | {minitri.__version__} |"
            )
    else:
        head = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"{head}\n\n{table(result)}")


def compare(
    engine: "minitri.Engine",
    requests: Sequence[Request],
    seeds: Sequence[int],
    speculations: Mapping[str, SpeculationConfig],
) -> dict[str, list[Run]]:
    """Reads every prompt without caches, then runs every method after it with every seed."""
    order = [*speculations]
    done: dict[str, list[Run]] = {name: [] for name in order}
    longest = max(speculations.values(), key=lambda one: one.max_block)  # its cache serves all
    for prompt in requests:
        engine.release()
        with engine.stream([prompt], speculation=longest, generation=prompt.generation) as reading:
            while isinstance(next(reading), minitri.PrefillProgress):
                seconds = reading.stats.prefill_seconds
        log.info("%d tokens read in %.1f s", len(prompt.prompt), seconds)
        for seed in seeds:
            request = dataclasses.replace(prompt, seed=seed)
            for name in order:
                run = run_method(engine, request, speculations[name], seconds)
                done[name].append(run)
                log.info("  seed %d, %s: %.1f ms/token", seed, name, run.ms_per_token)
            order.append(order.pop(0))
    return done


def run_method(
    engine: "minitri.Engine", request: Request, speculation: SpeculationConfig, read_seconds: float
) -> Run:
    """Runs a method after a prompt that was read in `read_seconds`."""
    run = engine.stream([request], speculation=speculation, generation=request.generation)
    share_cached = run.result().row_stats.num_cached_tokens / len(request.prompt)
    stats = run.stats
    # All tokens of its steps, those after the end of the text, too.
    num_made = stats.steps_per_plan.total() + stats.stages[-1].num_accepted_tokens
    prefill_seconds = share_cached * read_seconds + stats.prefill_seconds
    return Run(prefill_seconds, 1e3 * stats.decode_seconds / num_made, stats)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of some measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(done: Mapping[str, list[Run]]) -> dict[str, report.Json]:
    """Figures by method: medians and ranges; speedups over the first, if there are several."""
    result = {}
    first = next(iter(done.values()))
    for name, runs in done.items():
        plans = sum((run.stats.steps_per_plan for run in runs), Counter[str]())
        accepted, tested = Counter[str](), Counter[str]()
        for run in runs:
            for level in run.stats.levels:
                accepted[level.name] += level.num_accepted_tokens
                tested[level.name] += level.num_tested_tokens
        ratios = [one.ms_per_token / run.ms_per_token for one, run in zip(first, runs, strict=True)]
        result[name] = {
            "ms_per_token": spread([run.ms_per_token for run in runs]),
            "speedup": spread(ratios) if len(done) > 1 else None,
            "prefill_seconds": spread([run.prefill_seconds for run in runs]),
            "acceptance": {level: accepted[level] / n for level, n in tested.items() if n},
            "tokens_per_step": 1 + accepted["target"] / plans.total(),
            "steps_per_plan": dict(plans.most_common()),
        }
    return result


def table(result: Mapping[str, report.Json]) -> str:
    """Table of figures with a line for each method: medians, ranges, shares of tested guesses."""
    lines = []
    for name, row in result.items():
        line = TIMES.format(name, **row)
        line += SPEEDUP.format(**row) if row["speedup"] else ""
        rates = " ".join(f"{rate:.2f}" for rate in row["acceptance"].values()) or "-"
        lines.append(f"{line}, {row['tokens_per_step']:.2f} tokens/step, accepted {rates}")
    return "\n".join(lines)


main, methods = (
    exits.program(functools.partial(build_parser, name), measure) for name in ("compare", "methods")
)
