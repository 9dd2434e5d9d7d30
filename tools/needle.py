"""The needle test (TriForce, table 1): how well each kind of small KV cache follows the target to one hidden fact.

    python tools/needle.py --prompt-file novel.txt --prompt-tokens 2000 --prompt-tokens 8000 --budget 1024

One sentence with a seven-digit number stands at some depth of a text, and the question behind the text asks for it, in
the chat format of SmolLM2 and the words of the RULER benchmark. As there, the answer has been begun for the model, up
to the space before the number, so that what is tested is the number and no polite preamble, which any cache foretells,
and so that the query by which the small cache is chosen is the one that looks for the number.

Decoding is greedy and speculation is lossless, so by construction the answer is the same for every policy, that of the
full cache, right or wrong (in bfloat16 up to near-ties). What differs is how many of the small cache's guesses the
target accepts on the way: accepted / tested over the answer's tokens, up to its end.

A cell says that rate, with a `*` where the full cache's answer holds the number. The last line is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
from typing import Any

from minitri.engine import Engine, load
from minitri.errors import InputError
from minitri.cli.exits import clean_exits
from minitri.cli.arguments import OneLineParser, add_model_flags, add_size_flags, positive, speculation_of
from minitri.generate import read_prompt
from minitri.generation import Token
from minitri.settings import POLICIES, GenerationConfig, SpeculationConfig
from minitri.loading.tokenizer import Tokenizer

HEAD = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nA special magic number is hidden "
    "within the following text. Make sure to memorize it. I will quiz you about the number afterwards.\n\n"
)
NEEDLE = "One of the special magic numbers for purple-lemon is: {number}.\n"
TAIL = (
    "\n\nWhat is the special magic number for purple-lemon mentioned in the provided text?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
BEGINNING = "The special magic number for purple-lemon mentioned in the provided text is "


def build_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__)
    add_model_flags(parser)
    parser.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text to hide in (default: Python's help)")
    parser.add_argument(
        "--prompt-tokens", type=positive, action="append", metavar="N",
        help="may be given several times (default: 2000, 4000, 8000)",
    )  # fmt: skip
    parser.add_argument(
        "--depth", type=float, action="append", metavar="SHARE",
        help="share of the text before the sentence; may be given several times (default: 0.2, 0.5, 0.8)",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=positive, default=24, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the numbers (default: %(default)s)")
    parser.add_argument(
        "--policy", action="append", choices=(*POLICIES, "all"), help="may be given several times (default: all)"
    )
    parser.add_argument(
        "--whole-answer", action="store_true", help=f"do not begin the answer with {BEGINNING!r} for the model"
    )
    add_size_flags(parser.add_argument_group("speculation"))
    parser.set_defaults(gamma1=2, gamma2=6, budget=1024, prompt=None, method="retrieval", coupled=False)
    return parser


def hide(
    tokenizer: Tokenizer, text_ids: list[int], length: int, depth: float, number: int, beginning: str = BEGINNING
) -> list[int]:
    """A prompt of exactly `length` tokens with the number at a depth of the text, behind the end of a line.

    It ends in the beginning of the answer.
    """

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
    cut = next((i for i in range(cut, 0, -1) if tokenizer.decode(text_ids[i - 1 : i]).endswith("\n")), cut)
    return head + text_ids[:cut] + needle + text_ids[cut:room] + tail


def ask(engine: Engine, prompt: list[int], num_new: int, number: int, speculation: SpeculationConfig) -> dict[str, Any]:
    """One run: the answer, whether it holds the number, and how many of the guesses for it were accepted."""
    run = engine.generate(prompt, generation=GenerationConfig(num_new), speculation=speculation)
    # By the tokens of the answer: `Stats` would also count guesses of the last block behind the end of the answer.
    origins = [event.origin for event in run if isinstance(event, Token)]
    num_accepted, num_tested = origins.count("retrieval"), len(origins) - origins.count("bonus")
    if not num_tested:
        raise InputError("no guess was tested; raise --new-tokens")
    answer = run.rows[0].text
    return {
        "policy": speculation.policy, "answer": answer, "found": str(number) in answer.replace(",", ""),
        "num_accepted_tokens": num_accepted, "num_tested_tokens": num_tested, "agreement": num_accepted / num_tested,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    lengths, depths = args.prompt_tokens or [2000, 4000, 8000], args.depth or [0.2, 0.5, 0.8]
    if not all(0 <= depth <= 1 for depth in depths):
        raise InputError(f"depths are {depths}; give shares of the text from 0 to 1")
    policies = list(POLICIES) if not args.policy or "all" in args.policy else list(dict.fromkeys(args.policy))
    args.policy = policies[0]
    speculation = speculation_of(args)
    text = read_prompt(args)
    engine = load(
        args.model,
        draft="ngram",
        dtype=args.dtype,
        device=args.device,
        attention=args.attention,
        rope_scaling=args.rope_scaling,
    )
    text_ids = engine.tokenizer.encode(text)
    numbers = random.Random(args.seed)
    runs = []
    for length in lengths:
        for depth in depths:
            number = numbers.randint(1_000_000, 9_999_999)
            prompt = hide(engine.tokenizer, text_ids, length, depth, number, "" if args.whole_answer else BEGINNING)
            for policy in policies:
                print(f"{length} tokens, depth {depth}, {policy} ...", file=sys.stderr, flush=True)
                result = ask(engine, prompt, args.new_tokens, number, dataclasses.replace(speculation, policy=policy))
                runs.append({"prompt_tokens": length, "depth": depth, "number": number, **result})
    print(
        f"budget {args.budget}, gamma2 {args.gamma2}, at most {args.new_tokens} new tokens, {engine.model.dtype}; "
        "accepted / tested, * where the answer holds the number"
    )
    print(f"{'tokens':>6s}  {'policy':10s}" + "".join(f"  depth {depth:<4}" for depth in depths))
    for length in lengths:
        for policy in policies:
            row = [run for run in runs if (run["prompt_tokens"], run["policy"]) == (length, policy)]
            cells = [f"  {run['agreement']:.3f}{'*' if run['found'] else ' '}    " for run in row]
            print(f"{length:6d}  {policy:10s}" + "".join(cells).rstrip())
    means = {name: statistics.mean(run["agreement"] for run in runs if run["policy"] == name) for name in policies}
    print("mean    " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    dtype = str(engine.model.dtype).removeprefix("torch.")
    result = {"model": args.model, "dtype": dtype, "budget": args.budget, "gamma2": args.gamma2, "seed": args.seed}
    print(json.dumps({**result, "runs": runs, "mean": means}))


if __name__ == "__main__":
    with clean_exits():
        main()
