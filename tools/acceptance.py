"""How many guesses of the small KV cache the target accepts, for each rule of what that cache holds.

    python tools/acceptance.py --prompt-file A --prompt-file B --prompt-tokens 8000 --budget 1024 --policy all

Reads the first tokens of every text once; behind them runs autoregressive decoding and then, for each policy, the
method `retrieval` (the target with a small cache guesses, the target with the full cache verifies). Prints the
acceptance rate, accepted / tested, per text and policy with the mean over the texts, and ms/token. The last line is
JSON. The text that comes out follows the target's law whatever the policy; at a temperature above 0 it is another draw
for every policy, so the rates carry that noise, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

from turns import take_turns

from minitri.engine import Engine, load
from minitri.errors import InputError
from minitri.exits import clean_exits
from minitri.flags import OneLineParser, add_model_flags, add_sampling_flags, add_size_flags, positive, speculation_of
from minitri.generate import encode_prompt, read_prompt
from minitri.settings import POLICIES, SamplingParams, SpeculationConfig


def build_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="UTF-8 text; may be given several times (default: "
        "Python's help)",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=positive, default=8000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--policy", action="append", choices=(*POLICIES, "all"), help="may be given several times (default: all)"
    )
    add_sampling_flags(parser)
    add_size_flags(parser.add_argument_group("speculation"))
    parser.set_defaults(
        gamma1=2,
        gamma2=6,
        seed=0,
        temperature=0.6,
        top_p=0.9,
        budget=1024,
        prompt=None,
        method="retrieval",
        coupled=False,
    )
    return parser


def measure(
    engine: Engine, prompt: list[int], args: argparse.Namespace, speculations: list[SpeculationConfig]
) -> tuple[list[float], list[float]]:
    """Acceptance rates of the last level, and ms per token; those of autoregressive decoding, the first turn, are 1."""
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
    alone = dataclasses.replace(speculations[0], method="autoregressive")
    turns = take_turns(
        engine, prompt, [alone, *speculations], sampling=sampling, num_new=args.new_tokens, seed=args.seed
    )
    rates = [stats.levels[-1].acceptance_rate for stats in turns[1:]]
    if None in rates:
        raise InputError("no guess was tested; raise --new-tokens")
    return [1.0, *(rate for rate in rates if rate is not None)], [stats.ms_per_token or 0.0 for stats in turns]


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    names = list(POLICIES) if not args.policy or "all" in args.policy else list(dict.fromkeys(args.policy))
    args.policy = names[0]
    speculation = speculation_of(args)
    files = args.prompt_file or [None]
    texts = [read_prompt(argparse.Namespace(prompt=None, prompt_file=file)) for file in files]
    engine = load(args.model, draft="ngram", dtype=args.dtype, device=args.device, rope_scaling=args.rope_scaling)
    titles = [Path(file).stem if file else "demo" for file in files]
    rates: dict[str, list[float]] = {name: [] for name in ("none", *names)}
    times: dict[str, list[float]] = {name: [] for name in rates}
    for title, text in zip(titles, texts, strict=True):
        prompt = encode_prompt(engine, text, args.prompt_tokens)
        print(f"{title}: {len(prompt)} tokens", file=sys.stderr, flush=True)
        found = measure(engine, prompt, args, [dataclasses.replace(speculation, policy=name) for name in names])
        for name, rate, ms in zip(rates, *found, strict=True):
            rates[name].append(rate)
            times[name].append(ms)
            print(f"  {name} {rate:.3f}, {ms:.1f} ms/token", file=sys.stderr, flush=True)
    print(
        f"{args.prompt_tokens} prompt tokens, {args.new_tokens} new, budget {args.budget}, gamma2 {args.gamma2}, "
        f"temperature {args.temperature}, top-p {args.top_p}, {engine.model.dtype}; accepted / tested, and the median "
        "over the texts of ms/token; policy none is autoregressive decoding"
    )
    print(f"{'policy':10s} {'mean':>6s}  {'ms':>6s}  " + "  ".join(titles))
    for name, row in rates.items():
        cells = [f"{rate:{max(len(title), 5)}.3f}" for title, rate in zip(titles, row, strict=True)]
        print(f"{name:10s} {statistics.mean(row):6.3f}  {statistics.median(times[name]):6.1f}  " + "  ".join(cells))
    keys = ("prompt_tokens", "new_tokens", "budget", "gamma2", "temperature", "top_p", "seed", "rope_scaling")
    result = {key: getattr(args, key) for key in keys}
    result |= {"dtype": str(engine.model.dtype).removeprefix("torch."), "texts": titles, "acceptance": rates}
    result |= {"mean": {name: statistics.mean(row) for name, row in rates.items()}, "ms_per_token": times}
    print(json.dumps(result))


if __name__ == "__main__":
    with clean_exits():
        main()
