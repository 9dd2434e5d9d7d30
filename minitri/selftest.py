"""Does speculation change anything on *your* weights? `python -m minitri.selftest --model NAME`

Decodes one prompt autoregressively and with each speculative method, greedily and with seed-coupled draws, and compares
token by token. Where a text departs, the texts behind it cannot be compared; the logits there are computed once more
in float32, and the departure is called

- a numeric tie, if rounding explains it: in float32 both tokens score within `bound` of the best one, where `bound` is
  twice the largest difference, over the vocabulary, between the float32 logits and those of the dtype in use (one
  difference for each of the two runs), divided by the temperature where tokens are drawn;
- a BUG otherwise.

So a bug that only ever swaps tokens within the bound would pass for rounding; the bound is printed with the verdict,
and with --dtype float32 it leaves no such room. Exit codes: 0 all equal or numeric ties, 1 a bug, 2 bad input, 130
interrupted. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from typing import Any

import torch
from torch import Tensor

from minitri.caches import FullCache
from minitri.benchmarks.compare import num_same
from minitri.engine import Engine, load
from minitri.errors import shorten
from minitri.cli.arguments import (
    OneLineParser,
    add_draft_flag,
    add_gpu_flags,
    add_model_flags,
    add_prompt_flags,
    add_size_flags,
    draft_of,
    generation_of,
    speculation_of,
)
from minitri.generate import encode_prompt, finish, read_prompt, run_program
from minitri.model.llama import Llama
from minitri.runner import prefill, read_block
from minitri.settings import METHODS, SamplingParams, SpeculationConfig
from minitri.decoding.verification import hashed_uniforms, noise_key

log = logging.getLogger("minitri")

READ_AT_ONCE = 1024
"""Tokens of a sequence per forward pass when its logits are computed once more."""


def build_parser() -> OneLineParser:
    """The flags of the self-test."""
    parser = OneLineParser(
        prog="python -m minitri.selftest",
        description="Compares every speculative method with autoregressive decoding, token by token, on your weights.",
        epilog="examples:\n"
        "  python -m minitri.selftest --model smollm2-135m --dtype float32\n"
        "  python -m minitri.selftest --model llama2-7b-128k --method triforce --max-prompt-tokens 32000",
    )
    add_model_flags(parser)
    add_prompt_flags(parser, max_prompt_tokens=2000)
    parser.add_argument(
        "--method", action="append", choices=("auto", *METHODS[2:]),
        help="method to compare; may be given several times (default: all of them)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.8,
        help="of the seed-coupled draws (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=7, help="of those draws (default: %(default)s)"
    )
    add_draft_flag(parser)
    add_gpu_flags(parser)
    add_size_flags(parser.add_argument_group("speculation"))
    parser.add_argument("--quiet", action="store_true", help="no progress or log on standard error")
    parser.set_defaults(max_new_tokens=128, policy="retrieval", coupled=False)
    return parser


@dataclasses.dataclass(frozen=True)
class Mode:
    """How tokens are chosen in one round of comparisons."""

    name: str
    sampling: SamplingParams
    coupled: bool

    def scores(self, logits_V: Tensor, seed: int, position: int) -> Tensor:
        """What the token at a position is the argmax of, float64, up to a constant: logits, or log law + noise."""
        if not self.sampling.temperature:
            return logits_V.double()
        tokens = torch.arange(len(logits_V), device=logits_V.device)
        uniforms = hashed_uniforms(torch.full_like(tokens, noise_key(seed, position)), tokens)
        return logits_V.double() / self.sampling.temperature - (-uniforms.log()).log()


def modes(temperature: float) -> list[Mode]:
    """The two ways of choosing tokens that are the same for every method."""
    return [
        Mode("greedy", SamplingParams(), coupled=False),
        Mode("coupled", SamplingParams(temperature), coupled=True),
    ]


@dataclasses.dataclass(frozen=True)
class Departure:
    """The first token that differs, in numbers."""

    position: int
    """Of the token in the sequence, prompt included."""
    expected: int
    """The token of autoregressive decoding."""
    got: int
    top2_gap: float
    """Between the two best logits, in the dtype in use."""
    score_gap: float
    """How far the worse one of the two tokens scores below the best token of all, in float32."""
    bound: float
    """What rounding explains of that."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the departure."""
        return self.score_gap <= self.bound


def inspect(
    model: Llama,
    exact: Llama,
    sequence: list[int],
    expected: int,
    got: int,
    mode: Mode,
    seed: int,
    block: int,
) -> Departure:
    """Computes the logits behind `sequence` once more, in float32 by `exact` and in the dtype in use by `model`.

    The dtype's error is measured on logits read as decoding reads them, alone and at the end of a block, and is at
    least the spacing of the dtype's numbers at the largest logit.
    """
    exact_V = last_logits(exact, sequence, min(READ_AT_ONCE, len(sequence)))
    used_NV = torch.stack(
        [last_logits(model, sequence, width) for width in (1, min(block, len(sequence)))]
    )
    spacing = torch.finfo(model.dtype).eps * float(exact_V.abs().max())
    error = max(float((used_NV - exact_V).abs().max()), spacing)
    best_two = used_NV[0].topk(2).values
    scores = mode.scores(exact_V, seed, len(sequence))
    return Departure(
        position=len(sequence),
        expected=expected,
        got=got,
        top2_gap=float(best_two[0] - best_two[1]),
        score_gap=float(scores.max() - scores[[expected, got]].min()),
        bound=2 * error / (mode.sampling.temperature or 1.0),
    )


@torch.inference_mode()
def last_logits(model: Llama, sequence: list[int], width: int) -> Tensor:
    """Logits (V,) behind a sequence, through a fresh full cache: the last `width` tokens at once."""
    cache = FullCache.allocate(
        model.config, 1, len(sequence), dtype=model.dtype, device=model.device
    )
    start = len(sequence) - width
    for _ in prefill(model, sequence[: start + 1], cache, 0, chunk=READ_AT_ONCE):
        pass
    return model.logits(read_block(model, [sequence[start:]], cache)[0, -1])


class SelfTest:
    """Runs the comparisons of one engine on one prompt."""

    def __init__(self, engine: Engine, prompt: list[int], args: argparse.Namespace) -> None:
        self.engine = engine
        self.prompt = prompt
        self._args = args
        self._exact: Llama | None = None

    def compare(
        self, mode: Mode, method: str, speculation: SpeculationConfig, expected: list[int]
    ) -> dict[str, Any]:
        """One line on standard output, and the same as an object."""
        got = self.decode(mode, speculation)
        num_equal = num_same(expected, got, len(got))
        result = {
            "mode": mode.name,
            "method": method,
            "num_tokens": len(got),
            "num_equal_tokens": num_equal,
        }
        if num_equal == len(got):
            print(
                f"{mode.name:8s} {method:10s} equal: {num_equal} of {len(got)} tokens", flush=True
            )
            return {**result, "verdict": "equal"}
        self.engine.release()  # room for the model in float32
        found = inspect(
            self.engine.model, self.exact_model(), self.prompt + got[:num_equal], expected[num_equal], got[num_equal],
            mode, self._args.seed, speculation.max_block,
        )  # fmt: skip
        verdict = "numeric tie" if found.is_tie else "BUG"
        dtype = str(self.engine.model.dtype).removeprefix("torch.")
        print(
            f"{mode.name:8s} {method:10s} {verdict}: {num_equal} of {len(got)} tokens equal, then at position "
            f"{found.position} {self.spell(found.got)} instead of {self.spell(found.expected)}; top-2 logit gap "
            f"{found.top2_gap:.3g} in {dtype}; in float32 the worse of the two scores {found.score_gap:.3g} below the "
            f"best, rounding explains {found.bound:.3g}",
            flush=True,
        )
        return {**result, "verdict": verdict, **dataclasses.asdict(found)}

    def decode(self, mode: Mode, speculation: SpeculationConfig) -> list[int]:
        """The tokens of one run, which goes on behind the end of a text so that all have the same length."""
        args = self._args
        log.info(
            "%s, %s: %d tokens behind %d ...",
            mode.name,
            speculation.method,
            args.max_new_tokens,
            len(self.prompt),
        )
        run = self.engine.generate(
            self.prompt,
            sampling=mode.sampling,
            generation=generation_of(args, args.max_new_tokens),
            speculation=speculation,
            seed=args.seed,
        )
        end = finish(run, quiet=args.quiet)
        log.info(
            "  prefill %.1f s, %.1f ms/token",
            end.stats.prefill_seconds,
            end.stats.ms_per_token or 0.0,
        )
        return list(end.token_ids)

    def exact_model(self) -> Llama:
        """The model in float32: the one at work if it is, else loaded once, when first needed."""
        if self.engine.model.dtype == torch.float32:
            return self.engine.model
        if self._exact is None:
            args = self._args
            log.info("a difference: loading the model in float32 to look at it ...")
            self._exact = load(
                args.model, draft="ngram", dtype="float32", device=str(self.engine.model.device),
                rope_scaling=args.rope_scaling,
            ).model  # fmt: skip
        return self._exact

    def spell(self, token: int) -> str:
        """A token as text and id."""
        return f"{shorten(repr(self.engine.tokenizer.decode([token])), 30)} (id {token})"


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    methods = list(dict.fromkeys(args.method or METHODS[2:]))
    args.method = "triforce" if {"auto", "naive", "triforce"} & set(methods) else methods[0]
    speculation, draft = speculation_of(args), draft_of(args)
    all_modes = modes(args.temperature)
    generation_of(args, args.max_new_tokens)
    text = read_prompt(args)
    engine = load(
        args.model, draft=draft, dtype=args.dtype, device=args.device, attention=args.attention,
        rope_scaling=args.rope_scaling, progress=not args.quiet,
    )  # fmt: skip
    test = SelfTest(engine, encode_prompt(engine, text, args.max_prompt_tokens), args)
    results = []
    for mode in all_modes:
        settings = dataclasses.replace(speculation, coupled=mode.coupled)
        expected = test.decode(mode, dataclasses.replace(settings, method="autoregressive"))
        results += [
            test.compare(mode, method, dataclasses.replace(settings, method=method), expected)
            for method in methods
        ]
    verdicts = [result["verdict"] for result in results]
    counts = {name: verdicts.count(name) for name in ("equal", "numeric tie", "BUG")}
    summary = f"{len(results)} comparisons: {counts['equal']} equal, {counts['numeric tie']} numeric ties, "
    print(
        f"{summary}{counts['BUG']} bugs"
        + ("; please report the lines that say BUG" if counts["BUG"] else "")
    )
    report = {
        "model": args.model, "draft": draft, "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device), "torch": torch.__version__, "num_prompt_tokens": len(test.prompt),
        "num_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed,
        "num_equal": counts["equal"], "num_ties": counts["numeric tie"], "num_bugs": counts["BUG"],
        "comparisons": results,
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    return 1 if counts["BUG"] else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.selftest`."""
    run_program(build_parser(), run_command, argv)


if __name__ == "__main__":
    main()
