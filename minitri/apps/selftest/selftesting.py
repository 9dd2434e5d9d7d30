"""The self-test: does speculation change anything on *your* weights? `minitri selftest`

Greedy and seed-coupled texts of every method are compared with autoregressive decoding, token by
token; a difference is a tie if rounding explains it (`comparisons.py`), else a BUG. Above
temperature 0 statistical tests check that many short texts follow the model's distribution; an
alarm that rounding may cause is unclear. Exit codes: 0 no bug, 1 a bug or unclear."""

import json
from argparse import Namespace
from collections import Counter

from minitri.apps.cli import arguments, boot, exits, inputs, report
from minitri.core.settings import METHODS, SpeculationConfig

VERDICTS = {
    "equal": "speculation changes nothing",
    "consistent": "speculation changes nothing",
    "tie": "speculation changes nothing beyond rounding",
    "unclear": "rounding, or a bug; repeat with --dtype float32",
    "BUG": "speculation changes texts, which is a bug",
}  # from best to worst; the worst that occurs is the conclusion
COLUMNS = "mode method verdict num_tokens num_equal_tokens score_gap bound least_p_value"


def table(results: list[report.Json]) -> str:
    """The rows of comparisons as a text table, with the conclusion in the last line."""
    counts = Counter(row["verdict"] for row in results)
    verdicts = [verdict for verdict in VERDICTS if verdict in counts]
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    return f"{report.as_table(COLUMNS, results)}\n\n{VERDICTS[verdicts[-1]]}: {summary}"


def run_command(args: Namespace) -> int:
    """Runs all comparisons of the self-test; returns the exit code."""
    args.methods = args.methods or METHODS[2:]
    for method in args.methods:  # before anything is loaded
        SpeculationConfig(method)
    text = inputs.read_prompt(args.prompt_file, args.prompt)
    engine, [prompt] = boot.load_engine(args, text, usual_tokens=2000)
    from minitri.apps.selftest.comparisons import compare_samples, compare_texts  # with PyTorch

    rows = [*compare_texts(engine, prompt, args), *compare_samples(engine, prompt, args)]
    counts = Counter(row["verdict"] for row in rows)
    result = {
        "model": args.model,
        **report.where(engine.model),
        "num_prompt_tokens": len(prompt),
        "seed": args.seed,
        **{f"num_{verdict}": counts[verdict] for verdict in VERDICTS},
        "comparisons": rows,
    }
    print(json.dumps(result) if args.json else table(rows))
    return int(counts["BUG"] + counts["unclear"] > 0)


main = exits.program(lambda: arguments.OneLineParser("selftest"), run_command, parallel=True)
