"""The needle test (TriForce, table 1): how well each policy follows the target to one hidden fact.

    python -m tools.paper.needle --prompt-file novel.txt --prompt-tokens 2000 --prompt-tokens 8000

One sentence with a seven-digit number stands at some depth of a text, and the question after the
text asks for it, in the chat format of SmolLM2 and the words of the RULER benchmark. As there, the
answer has been begun for the model, up to the space before the number, so that what is tested is
the number and no polite preamble, and so that the query by which the retrieval cache is filled is
the one that looks for the number.

Decoding is greedy and speculation is lossless, so by construction the answer is the same for every
policy, that of the full cache, right or wrong (in bfloat16 up to near-ties). What differs is how
many of the retrieval cache's guesses the target accepts on the way: accepted / tested over the
answer's tokens, up to its end.

A cell says that rate, with a `*` where the full cache's answer holds the number. The last line is
JSON.
"""

import argparse
import json
import random
import statistics
import sys
from typing import Any

from minitri.cli import arguments
from minitri.cli.exits import program
from minitri.cli.inputs import read_prompt
from minitri.engine import Engine
from minitri.errors import InputError
from minitri.loader import load
from minitri.loading.tokenizer import Tokenizer
from minitri.requests import Token
from minitri.settings import SpeculationConfig
from tools.paper.baselines.policies import NAMES, speculation_with

HEAD = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nA special magic "
    "number is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the number afterwards.\n\n"
)
NEEDLE = "One of the special magic numbers for purple-lemon is: {number}.\n"
TAIL = (
    "\n\nWhat is the special magic number for purple-lemon mentioned in the provided text?"
    "<|im_end|>\n<|im_start|>assistant\n"
)
BEGINNING = "The special magic number for purple-lemon mentioned in the provided text is "


def build_parser() -> arguments.OneLineParser:
    parser, shown = arguments.OneLineParser(description=__doc__), "(default: %(default)s)"
    arguments.add_flags(parser, *arguments.MODEL)
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8 text to hide in (default: Python's help)"
    )
    for name, kind, metavar, text in (
        ("prompt-tokens", arguments.positive, "N", "several times (default: 2000, 4000, 8000)"),
        ("depth", float, "SHARE", "several times: text before the sentence (0.2, 0.5, 0.8)"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, action="append", metavar=metavar, help=f"may be given {text}"
        )
    for name, count, default, text in (
        ("new-tokens", arguments.positive, 24, f"at most {shown}"),
        ("seed", int, 0, f"of the numbers {shown}"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    parser.add_argument(
        "--policy",
        action="append",
        choices=(*NAMES, "all"),
        help="may be given several times (default: all)",
    )
    parser.add_argument(
        "--whole-answer", action="store_true", help=f"do not begin the answer with {BEGINNING!r}"
    )
    arguments.add_flags(parser, *arguments.SIZES, title="speculation")
    parser.set_defaults(gamma1=2, gamma2=6, budget=1024, method="retrieval", quiet=True)
    return parser


def hide(
    tokenizer: Tokenizer,
    text_ids: list[int],
    length: int,
    depth: float,
    number: int,
    beginning: str = BEGINNING,
) -> list[int]:
    """A prompt of exactly `length` tokens with the number at a depth of the text, after the end of
    a line. It ends in the beginning of the answer."""

    def encode(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text) if token != tokenizer.bos_token_id]

    needle, tail = encode(NEEDLE.format(number=number)), encode(TAIL) + encode(beginning)
    head = tokenizer.encode(HEAD)
    room = length - len(head) - len(needle) - len(tail)
    if not 0 < room <= len(text_ids):
        raise InputError(
            f"a prompt of {length} tokens needs {room} tokens of text; choose --prompt-tokens from "
            f"{length - room + 1} to {length - room + len(text_ids)}, or another file"
        )
    cut = round(depth * room)
    while cut and not tokenizer.decode(text_ids[cut - 1 : cut]).endswith("\n"):
        cut -= 1
    cut = cut or round(depth * room)
    return head + text_ids[:cut] + needle + text_ids[cut:room] + tail


def ask(
    engine: Engine, prompt: list[int], num_new: int, number: int, speculation: SpeculationConfig
) -> dict[str, Any]:
    """One run: the answer, whether it holds the number, and how many guesses were accepted.

    Counted are the tokens of the answer: `Stats` would also count guesses after its end.
    """
    run = engine.generate(prompt, max_new_tokens=num_new, speculation=speculation, seed=0)
    origins = [event.origin for event in run if isinstance(event, Token)]
    num_accepted, num_tested = origins.count("retrieval"), len(origins) - origins.count("bonus")
    if not num_tested:
        raise InputError("no guess was tested; raise --new-tokens")
    answer = run.rows[0].text
    return {
        "answer": answer,
        "found": str(number) in answer.replace(",", ""),
        "num_accepted_tokens": num_accepted,
        "num_tested_tokens": num_tested,
        "agreement": num_accepted / num_tested,
    }


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    lengths, depths = args.prompt_tokens or [2000, 4000, 8000], args.depth or [0.2, 0.5, 0.8]
    if not all(0 <= depth <= 1 for depth in depths):
        raise InputError(f"depths are {depths}; give shares of the text from 0 to 1")
    names = list(dict.fromkeys(args.policy or ["all"]))
    policies, args.policy = list(NAMES) if "all" in names else names, "retrieval"
    speculation = arguments.speculation_of(args)
    text = read_prompt(args.prompt_file)
    engine = load(**arguments.model_of(args) | {"draft": "ngram"})
    text_ids, numbers, runs = engine.tokenizer.encode(text), random.Random(args.seed), []
    for length, depth in ((length, depth) for length in lengths for depth in depths):
        number = numbers.randint(1_000_000, 9_999_999)
        beginning = "" if args.whole_answer else BEGINNING
        prompt = hide(engine.tokenizer, text_ids, length, depth, number, beginning)
        for policy in policies:
            print(f"{length} tokens, depth {depth}, {policy} ...", file=sys.stderr, flush=True)
            settings = speculation_with(policy, speculation)
            result = ask(engine, prompt, args.new_tokens, number, settings)
            where = {"prompt_tokens": length, "depth": depth, "number": number}
            runs.append({**where, "policy": policy, **result})
    show(engine, args, policies, runs)


def show(
    engine: Engine, args: argparse.Namespace, policies: list[str], runs: list[dict[str, Any]]
) -> None:
    """Prints the rates as a table and as JSON."""
    print(
        f"budget {args.budget}, gamma2 {args.gamma2}, at most {args.new_tokens} new tokens, "
        f"{engine.model.dtype}; accepted / tested, * where the answer holds the number"
    )
    depths = dict.fromkeys(run["depth"] for run in runs)
    print(f"{'tokens':>6s}  {'policy':10s}" + "".join(f"  depth {depth:<4}" for depth in depths))
    for length in dict.fromkeys(run["prompt_tokens"] for run in runs):
        for policy in policies:
            row = [run for run in runs if (run["prompt_tokens"], run["policy"]) == (length, policy)]
            cells = [f"  {run['agreement']:.3f}{'*' if run['found'] else ' '}    " for run in row]
            print(f"{length:6d}  {policy:10s}" + "".join(cells).rstrip())
    rates = {name: [run["agreement"] for run in runs if run["policy"] == name] for name in policies}
    means = {name: statistics.mean(row) for name, row in rates.items()}
    print("mean    " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    dtype = str(engine.model.dtype).removeprefix("torch.")
    result = {"model": args.model, "dtype": dtype, "budget": args.budget, "gamma2": args.gamma2}
    print(json.dumps({**result, "seed": args.seed, "runs": runs, "mean": means}))


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
