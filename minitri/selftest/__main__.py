"""Does speculation change anything on *your* weights? `minitri selftest --model NAME`

Decodes one prompt autoregressively and with each speculative method, greedily and with seed-coupled
sampling, and compares token by token. A difference is called a tie if rounding explains it
(`departures.py`), and a BUG otherwise. Then the default mode, independent random numbers: of many
short texts statistical tests tell whether they follow the model's distribution
(`distribution_test.py`); where passes of other lengths round differently an alarm is unclear.

Exit codes: 0 all is well, 1 a bug. The last line of standard output is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    from typing import Any

    from minitri import GenerationConfig, SamplingParams
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import where
    from minitri.settings import METHODS

VERDICTS = ("equal", "tie", "consistent", "unclear", "BUG")


def build_parser() -> arguments.OneLineParser:
    """The flags of the self-test."""
    parser = arguments.OneLineParser(
        "selftest",
        "--temperature 0.6 --top-p 0.9 --num-samples 20000",
        description="Does speculation change the text, or its distribution, on your weights?",
    )
    arguments.add_flags(parser, *arguments.MODEL)
    arguments.add_prompt_flags(parser)
    add = parser.add_argument
    choices = ("auto", *METHODS[2:])
    text = "may be given several times (default: naive, retrieval, triforce)"
    add("--method", action="append", choices=choices, dest="methods", help=text)
    text = "tokens per method in the statistical test; 0 leaves it out"
    add("--num-samples", type=arguments.whole(0, 10**6), metavar="N", default=2048, help=text)
    arguments.add_flags(parser, *arguments.MEMORY)
    arguments.add_flags(parser, "draft", *arguments.SIZES, title="speculation")
    arguments.add_flags(parser, *arguments.SAMPLING, "seed", title="sampling")
    parser.set_defaults(
        max_prompt_tokens=2000, max_new_tokens=128, ignore_eos=True, temperature=0.8, seed=7
    )
    return parser


def show(mode: str, method: str, found: dict[str, Any]) -> dict[str, Any]:
    """Prints a comparison as a line; returns it for the report."""
    numbers = (f"{name} {n:g}" for name, n in found.items() if isinstance(n, int | float))
    print(f"{mode:8s} {method:14s} {found['verdict']}: {', '.join(numbers)}", flush=True)
    return {"mode": mode, "method": method, **found}


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    methods = list(dict.fromkeys(args.methods or METHODS[2:]))
    args.method = "retrieval" if methods == ["retrieval"] else "triforce"  # which has a drafter
    speculation = arguments.speculation_of(args)
    sampling = arguments.taken(SamplingParams, args)
    arguments.taken(GenerationConfig, args)  # bad values fail before anything is loaded
    with clean_imports():  # of PyTorch: no flag is wrong any more
        from minitri.selftest.comparisons import SelfTest
        from minitri.selftest.distribution_test import FALSE_ALARM
    engine, [prompt] = load_engine(args, [read_prompt(args.prompt_file, args.prompt)])
    test = SelfTest(engine, prompt, args)
    results = []
    for mode, temperature in (("greedy", 0.0), ("coupled", args.temperature)):
        alone, *configs = (
            dataclasses.replace(speculation, method=method, coupled=mode == "coupled")
            for method in ("autoregressive", *methods)
        )
        expected = test.decode(alone, temperature)
        for config in configs:
            results.append(show(mode, config.method, test.compare(config, temperature, expected)))
    if args.num_samples and sampling.temperature:
        for method in methods:
            config = dataclasses.replace(speculation, method=method)
            found = test.check_samples(config, sampling, len(methods))
            results.append(show("sampled", method, found))
        print(f"a false alarm in the samples has odds of 1 in {1 / FALSE_ALARM:,.0f}")
    verdicts = [result["verdict"] for result in results]
    if "unclear" in verdicts:
        print("unclear: rounding, or a bug; repeat with --dtype float32")
    counts = {f"num_{verdict}": verdicts.count(verdict) for verdict in VERDICTS}
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    report = {"model": args.model, **where(engine.model), "num_prompt_tokens": len(prompt)}
    print(json.dumps({**report, "seed": args.seed, **counts, "comparisons": results}), flush=True)
    return int("BUG" in verdicts or "unclear" in verdicts)


main = program(build_parser, run_command, parallel=True)

if __name__ == "__main__":
    main()
