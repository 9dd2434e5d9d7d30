"""Does speculation change anything on *your* weights? `minitri selftest --model NAME`

Decodes one prompt autoregressively and with each speculative method, greedily and with seed-coupled
sampling, and compares token by token. A difference is called a tie if rounding explains it
(`departures.py`), and a BUG otherwise. Then the default mode, independent random numbers: of many
short texts statistical tests tell whether they follow the model's distribution
(`distribution_test.py`); where passes of other lengths round differently an alarm is unclear.

Exit codes: 0 all is well, 1 a bug. Prints a table, or with --json one JSON object.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    from collections import Counter
    from typing import Any

    from minitri import GenerationConfig, SamplingParams
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import as_table, where
    from minitri.log import log
    from minitri.settings import METHODS

VERDICTS = {
    "equal": "speculation changes nothing",
    "consistent": "speculation changes nothing",
    "tie": "speculation changes nothing beyond rounding",
    "unclear": "rounding, or a bug; repeat with --dtype float32",
    "BUG": "speculation changes texts, which is a bug",
}
"""And what the worst of them means."""
COLUMNS = {"mode": 8, "method": 14, "verdict": 10, "num_tokens": 12, "num_equal_tokens": 18}
COLUMNS |= {"position": 10, "score_gap": 10, "bound": 10, "least_p_value": 0}
"""What the table shows, and how many characters wide."""


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
    text = "print one JSON object instead of the table"
    add("--json", action="store_true", help=text)
    parser.set_defaults(
        max_prompt_tokens=2000, max_new_tokens=128, ignore_eos=True, temperature=0.8, seed=7
    )
    return parser


def note(mode: str, method: str, found: dict[str, Any]) -> dict[str, Any]:
    """Logs a comparison; returns it for the report."""
    log.info("%s, %s: %s", mode, method, found["verdict"])
    return {"mode": mode, "method": method, **found}


def table(results: list[dict[str, Any]]) -> str:
    """The comparisons for people, and what they say, in a last line."""
    counts = Counter(row["verdict"] for row in results)
    found = [verdict for verdict in VERDICTS if verdict in counts]
    says = ", ".join(f"{counts[verdict]} {verdict}" for verdict in found)
    return f"{as_table(results, COLUMNS)}\n\n{VERDICTS[found[-1]]}: {says}"


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    methods = list(dict.fromkeys(args.methods or METHODS[2:]))
    args.method = "retrieval" if methods == ["retrieval"] else "triforce"  # which has a drafter
    speculation = arguments.speculation_of(args)
    sampling = arguments.taken(SamplingParams, args)
    arguments.taken(GenerationConfig, args)  # bad values fail before anything is loaded
    engine, [prompt] = load_engine(args, [read_prompt(args.prompt_file, args.prompt)])
    from minitri.selftest.comparisons import SelfTest  # with PyTorch
    from minitri.selftest.distribution_test import FALSE_ALARM

    test = SelfTest(engine, prompt, args)
    results = []
    for mode, temperature in (("greedy", 0.0), ("coupled", args.temperature)):
        alone, *configs = (
            dataclasses.replace(speculation, method=method, coupled=mode == "coupled")
            for method in ("autoregressive", *methods)
        )
        expected = test.decode(alone, temperature)
        for config in configs:
            results.append(note(mode, config.method, test.compare(config, temperature, expected)))
    if args.num_samples and sampling.temperature:
        for method in methods:
            config = dataclasses.replace(speculation, method=method)
            found = test.check_samples(config, sampling, len(methods))
            results.append(note("sampled", method, found))
        log.info("a false alarm in the samples has odds of 1 in %.0f", 1 / FALSE_ALARM)
    verdicts = [result["verdict"] for result in results]
    counts = {f"num_{verdict}": verdicts.count(verdict) for verdict in VERDICTS}
    report = {"model": args.model, **where(engine.model), "num_prompt_tokens": len(prompt)}
    report |= {"seed": args.seed, **counts, "comparisons": results}
    print(json.dumps(report) if args.json else table(results), flush=True)
    return int("BUG" in verdicts or "unclear" in verdicts)


main = program(build_parser, run_command, parallel=True)

if __name__ == "__main__":
    main()
