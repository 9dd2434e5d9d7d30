"""Does speculation change anything on *your* weights? `python -m minitri.selftest --model NAME`

Decodes one prompt autoregressively and with each speculative method, greedily and with seed-coupled
sampling, and compares token by token. A difference is called a numeric tie if rounding explains it
(`benchmarks/departures.py`), and a BUG otherwise. A bug that only swaps tokens within the bound of
rounding would pass for it; the bound is printed, and with --dtype float32 it leaves no such room.
Exit codes: 0 all equal or numeric ties, 1 a bug, 2 bad input, 130 interrupted. The last line of
standard output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from typing import Any

from minitri.cli.exits import clean_exits, program

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    import torch

    from minitri.benchmarks.compare import num_same
    from minitri.benchmarks.departures import Mode, explain, modes
    from minitri.cli import arguments
    from minitri.cli.prompts import encode_prompt, read_prompt
    from minitri.cli.terminal import finish
    from minitri.engine import Engine, load
    from minitri.errors import shorten
    from minitri.model.llama import Llama
    from minitri.settings import METHODS, SpeculationConfig

log = logging.getLogger("minitri")


def build_parser() -> arguments.OneLineParser:
    """The flags of the self-test."""
    start, shown = "  python -m minitri.selftest --model", "(default: %(default)s)"
    parser = arguments.OneLineParser(
        prog="python -m minitri.selftest",
        description="Compares every speculative method with autoregressive decoding, token by "
        "token, on your weights.",
        epilog=f"""examples:
{start} smollm2-135m --dtype float32
{start} llama2-7b-128k --method triforce --max-prompt-tokens 32000""",
    )
    arguments.add_model_flags(parser)
    arguments.add_prompt_flags(parser, max_prompt_tokens=2000)
    parser.add_argument(
        "--method", action="append", choices=("auto", *METHODS[2:]),
        help="method to compare; may be given several times (default: naive, retrieval, triforce)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, metavar="T", default=0.8,
        help=f"of the seed-coupled runs {shown}",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", default=7, help=f"of those runs {shown}")
    arguments.add_draft_flag(parser)
    arguments.add_gpu_flags(parser)
    arguments.add_size_flags(parser.add_argument_group("speculation"))
    parser.add_argument("--quiet", action="store_true", help="no progress or log on standard error")
    parser.set_defaults(max_new_tokens=128)
    return parser


class SelfTest:
    """Runs the comparisons of one engine on one prompt."""

    def __init__(self, engine: Engine, prompt: list[int], args: argparse.Namespace) -> None:
        self.engine = engine
        self.prompt = prompt
        self._args = args
        self._exact: Llama | None = None

    def compare(
        self, mode: Mode, speculation: SpeculationConfig, expected: list[int]
    ) -> dict[str, Any]:
        """One line on standard output, and the same as an object."""
        got, method, model = self.decode(mode, speculation), speculation.method, self.engine.model
        n = num_same(expected, got, len(got))
        result = {"mode": mode.name, "method": method, "num_tokens": len(got)}
        result |= {"num_equal_tokens": n}
        if n == len(got):
            print(f"{mode.name:8s} {method:10s} equal: {n} of {len(got)} tokens", flush=True)
            return {**result, "verdict": "equal"}
        self.engine.release()  # room for the model in float32
        found = explain(
            model, self.exact_model(), self.prompt + got[:n], mode,
            expected=expected[n], got=got[n], seed=self._args.seed, block=speculation.max_block,
        )  # fmt: skip
        verdict = "numeric tie" if found.is_tie else "BUG"
        print(
            f"{mode.name:8s} {method:10s} {verdict}: {n} of {len(got)} tokens equal, then at "
            f"position {found.position} {self.spell(found.got)} instead of "
            f"{self.spell(found.expected)}; top-2 logit gap {found.top2_gap:.3g} in "
            f"{str(model.dtype).removeprefix('torch.')}; in float32 the worse of the two scores "
            f"{found.score_gap:.3g} below the best, rounding explains {found.bound:.3g}",
            flush=True,
        )
        return {**result, "verdict": verdict, **dataclasses.asdict(found)}

    def decode(self, mode: Mode, speculation: SpeculationConfig) -> list[int]:
        """The tokens of one run.

        It goes on behind the end of a text, so that all runs have the same length.
        """
        num_new, quiet = self._args.max_new_tokens, self._args.quiet
        what = mode.name, speculation.method, num_new, len(self.prompt)
        log.info("%s, %s: %d tokens behind %d ...", *what)
        generation = arguments.generation_of(self._args, num_new)
        run = self.engine.generate(
            self.prompt, sampling=mode.sampling, generation=generation, speculation=speculation,
            seed=self._args.seed,
        )  # fmt: skip
        end = finish(run, quiet=quiet)
        seconds, ms = end.stats.prefill_seconds, end.stats.ms_per_token or 0.0
        log.info("  prefill %.1f s, %.1f ms/token", seconds, ms)
        return list(end.token_ids)

    def exact_model(self) -> Llama:
        """The model in float32: the one that is tested, or else loaded when first needed."""
        if self.engine.model.dtype == torch.float32:
            return self.engine.model
        if self._exact is None:
            log.info("a difference: loading the model in float32 to look at it ...")
            flags = arguments.model_of(self._args) | {"dtype": "float32", "attention": "auto"}
            flags |= {"device": str(self.engine.model.device), "progress": False}
            self._exact = load(**flags, draft="ngram").model
        return self._exact

    def spell(self, token: int) -> str:
        """A token as text and id."""
        return f"{shorten(repr(self.engine.tokenizer.decode([token])), 30)} (id {token})"


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    methods = list(dict.fromkeys(args.method or METHODS[2:]))
    args.method = "triforce" if {"auto", "naive", "triforce"} & set(methods) else methods[0]
    speculation, draft = arguments.speculation_of(args), arguments.draft_of(args)
    both = modes(args.temperature)
    arguments.generation_of(args, args.max_new_tokens)  # bad values fail before anything is loaded
    text = read_prompt(args.prompt_file, args.prompt)
    engine = load(**arguments.model_of(args), draft=draft)
    test = SelfTest(engine, encode_prompt(engine, text, args.max_prompt_tokens), args)
    results = []
    for mode in both:
        alone, *others = (
            dataclasses.replace(speculation, method=method, coupled=mode.coupled)
            for method in ("autoregressive", *methods)
        )
        expected = test.decode(mode, alone)
        results += [test.compare(mode, other, expected) for other in others]
    verdicts = [result["verdict"] for result in results]
    equal, ties, bugs = (verdicts.count(name) for name in ("equal", "numeric tie", "BUG"))
    advice = "; please report the lines that say BUG" if bugs else ""
    print(f"{len(results)} comparisons: {equal} equal, {ties} numeric ties, {bugs} bugs{advice}")
    report = {
        "model": args.model, "draft": draft,
        "dtype": str(engine.model.dtype).removeprefix("torch."), "device": str(engine.model.device),
        "torch": torch.__version__, "num_prompt_tokens": len(test.prompt),
        "num_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed,
        "num_equal": equal, "num_ties": ties, "num_bugs": bugs, "comparisons": results,
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    return 1 if bugs else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.selftest`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
