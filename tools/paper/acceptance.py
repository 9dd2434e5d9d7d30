"""How many guesses of the retrieval cache the target accepts, by policy, and how many of a drafter.

    python -m tools.paper.acceptance --prompt-file A --prompt-file B --prompt-tokens 8000

Reads the first tokens of every text once and lets the target continue it, remembering the
distribution of every token. Then the same continuation is put through a retrieval cache of each
policy, `gamma2` tokens between two commits as the method `retrieval` would, and through the
drafter, `gamma1` tokens between two commits. What is printed is the expected acceptance rate: a
guess sampled from q is accepted by p with probability sum(min(p, q)), and tested if all before it
in its block were accepted. So no sampling adds noise, and every policy meets the same tokens:
differences are much better known than the rates, of which the standard error is given. The last
line is JSON.

Rows: a policy's name (guesses with the retrieval cache, accepted by the full one), `draft` (the
drafter's, by the full cache, as in the method naive), `draft POLICY` (the drafter's, by the
retrieval cache, as in triforce), and with `--copy C`, which stands for `--draft-weights C`, `POLICY
C` (guesses of such a copy) and `POLICY C overlap` (1 - TV of its distributions from those of the
plain weights over the same cache). A copy in int8 is here a model of rounded weights, which
in float32 is what `gpu/quantized_copies.py` computes.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.cli import arguments
from minitri.cli.exits import program
from minitri.cli.inputs import read_prompt
from minitri.cpu.kernel_layers import quantized_copy
from minitri.decoding.sampling import sample
from minitri.decoding.verification import Proposal
from minitri.engine import Engine
from minitri.errors import InputError
from minitri.gpu.quantized_copies import dequantize, quantize
from minitri.loader import load
from minitri.loading.prompt_ids import check_prompt
from minitri.model.linear import Linear
from minitri.model.llama import Llama
from minitri.runner import DraftRunner, ModelRunner, prefill
from minitri.settings import SamplingParams, SpeculationConfig
from tools.paper.baselines.policies import NAMES, speculation_with


def build_parser() -> arguments.OneLineParser:
    parser, shown = arguments.OneLineParser(description=__doc__), "(default: %(default)s)"
    arguments.add_flags(parser, *arguments.MODEL)
    parser.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="UTF-8 text; may be given several times (default: Python's help)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=(*NAMES, "all"),
        help="may be given several times (default: all)",
    )
    for name, count in (("prompt-tokens", 8000), ("new-tokens", 256)):
        parser.add_argument(
            f"--{name}", type=arguments.positive, default=count, metavar="N", help=shown
        )
    parser.add_argument(
        "--draft",
        default="none",
        metavar="auto|NAME|DIR|none",
        help=f"also measure this drafter; auto is the one that belongs to the model {shown}",
    )
    parser.add_argument(
        "--copy",
        action="append",
        default=[],
        choices=("int4", "int8"),
        help="also measure a copy of the weights; may be given several times",
    )
    arguments.add_flags(parser, *arguments.SAMPLING, "seed", title="sampling")
    arguments.add_flags(parser, *arguments.SIZES, title="speculation")
    sizes = {"gamma1": 3, "gamma2": 3, "budget": 1024, "method": "retrieval"}
    parser.set_defaults(**sizes, seed=0, temperature=0.6, top_p=0.9, quiet=True)
    return parser


Rate = tuple[float, float]
"""An acceptance rate and its standard error."""


class Continuation:
    """A prompt and what the target said after it, with the full cache, distributions, queries."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        args: argparse.Namespace,
        speculations: list[SpeculationConfig],
    ) -> None:
        """Has the retrieval caches of all settings observe the prompt."""
        model, config, num_new = engine.model, engine.config, args.new_tokens
        self.model, self.num_prompt, self.tokens = model, len(prompt), list(prompt)
        self.sampling = arguments.taken(SamplingParams, args)
        self.speculation = speculations[0]
        self.options: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        capacity = len(prompt) + num_new + self.speculation.max_block
        self.full = FullCache.allocate(config, 1, capacity, **self.options)
        self.caches = [
            RetrievalCache(
                self.full,
                speculation,
                budgets=[speculation.budget_for(len(prompt))],
                num_heads=config.num_heads,
            )
            for speculation in speculations
        ]

        def watch(queries_LTHD: Tensor) -> None:
            for cache in self.caches:
                cache.observe(0, queries_LTHD)

        started = time.perf_counter()
        for done in prefill(model, prompt, self.full, 0, chunk=1024, watch=watch):
            print(f"\r  read {done + 1} of {len(prompt)} tokens", end="", file=sys.stderr)
        print(f", {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        self._continue(num_new, torch.Generator().manual_seed(args.seed))

    def _continue(self, num_new: int, generator: torch.Generator) -> None:
        config = self.model.config
        shape = (config.num_layers, 1, 1, config.num_heads, config.head_dim)
        query = torch.empty(shape, **self.options)
        runner = ModelRunner(
            self.model, self.full, self.sampling, vocab_size=config.vocab_size, queries_LBTHD=query
        )
        probs, queries = [], []
        for _ in range(num_new):
            probs.append(runner.next_probs([self.tokens], [True]).probs_BNV[0, -1])
            queries.append(query[:, 0].clone())
            uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(self.model.device)
            self.tokens.append(int(sample(probs[-1][None], uniform)))
        self.probs_NV = torch.stack(probs)
        """Row i: the distribution of the i-th new token."""
        self.queries_LNHD = torch.cat(queries, 1)
        """Those of the last prompt token and of every new token but the last."""

    def by_cache(self, model: Llama, cache: RetrievalCache, gamma2: int) -> tuple[Rate, Tensor]:
        """How many of a model's guesses with a retrieval cache the target accepts, and their
        distributions (N, V)."""
        vocab_size = self.probs_NV.shape[1]
        runner = ModelRunner(model, cache, self.sampling, vocab_size=vocab_size)
        self.full.crop([self.num_prompt - 1])

        def commit(num_tokens: int) -> None:
            first = self.full.lengths[0] - (self.num_prompt - 1)
            queries_LTHD = self.queries_LNHD[:, first : num_tokens - self.num_prompt]
            self.full.advance([queries_LTHD.shape[1]])
            cache.commit(0, queries_LTHD)

        probs_NV = self._probs(runner, commit, gamma2)
        return expected_rate(probs_NV, self.probs_NV, gamma2), probs_NV

    def by_drafter(self, drafter: Llama, gamma1: int) -> Tensor:
        """The drafter's distributions (N, V) of the new tokens."""
        naive = dataclasses.replace(self.speculation, method="naive", gamma1=gamma1)
        vocab_size = self.probs_NV.shape[1]
        cache = StreamingCache(drafter.config, drafter.rope, 1, naive, **self.options)
        runner = DraftRunner(drafter, cache, self.sampling, vocab_size=vocab_size)
        return self._probs(runner, lambda n: runner.prepare([self.tokens[:n]], [True]), gamma1)

    def _probs(self, runner: ModelRunner, commit: Callable[[int], None], gamma: int) -> Tensor:
        """A stage's distributions of the new tokens, as far as whole blocks go.

        Its cache learns of gamma + 1 tokens at once.
        """
        probs = [self.probs_NV[:1]]
        while (num_done := sum(map(len, probs))) + gamma < len(self.probs_NV):
            commit(self.num_prompt + num_done)
            end = self.num_prompt + num_done
            nothing = torch.empty(1, gamma, 0, device=self.model.device)
            guesses = Proposal.of([self.tokens[end : end + gamma]], nothing, [["draft"] * gamma])
            probs.append(runner.next_probs([self.tokens[:end]], [True], guesses).probs_BNV[0])
        return torch.cat(probs)


def expected_rate(probs_NV: Tensor, verifier_NV: Tensor, gamma: int) -> Rate:
    """Expected accepted over expected tested guesses, and the standard error of that.

    Guesses come gamma at a time, to which the verifier adds one.
    """
    accepted, tested = [], []
    for i in range(1, min(len(probs_NV), len(verifier_NV)) - gamma, gamma + 1):
        overlap_N = torch.minimum(probs_NV[i : i + gamma], verifier_NV[i : i + gamma]).sum(1)
        survival = overlap_N.clamp(max=1).cumprod(0).tolist()
        accepted.append(sum(survival))
        tested.append(1 + sum(survival[:-1]))
    rate = sum(accepted) / sum(tested)
    misses = [a - rate * t for a, t in zip(accepted, tested, strict=True)]
    return rate, math.sqrt(sum(miss * miss for miss in misses)) / sum(tested)


def overlap(probs_NV: Tensor, others_NV: Tensor) -> Rate:
    """Mean of 1 - TV between the rows, but for the first, which is the target's own."""
    overlap_N = torch.minimum(probs_NV, others_NV).sum(1)[1:]
    return float(overlap_N.mean()), float(overlap_N.std() / math.sqrt(len(overlap_N)))


def rounded_copy(model: Llama, args: argparse.Namespace, name: str) -> Llama:
    """What guesses with `--draft-weights name`."""
    if name == "int4":
        return quantized_copy(model)
    twin = load(**arguments.model_of(args) | {"draft": "suffix"}).model
    for layer in twin.modules():
        if isinstance(layer, Linear):
            rounded_NE = dequantize(*quantize(layer.weight, 8))
            layer.weight.copy_(rounded_NE[:, : layer.in_features])
    twin.lent_embedding = model.embed
    return twin


def measure(
    engine: Engine,
    prompt: list[int],
    args: argparse.Namespace,
    speculations: dict[str, SpeculationConfig],
    copies: dict[str, Llama],
    found: defaultdict[str, list[Rate]],
) -> None:
    """Adds the rates after one prompt to those that were found."""
    settings = [it for it in speculations.values() for _ in ("", *copies)]
    continuation, draft_NV = Continuation(engine, prompt, args, settings), None
    if engine.models.draft is not None:
        draft_NV = continuation.by_drafter(engine.models.draft, args.gamma1)
        rate = expected_rate(draft_NV, continuation.probs_NV, args.gamma1)
        found["draft"].append(rate)
    caches = iter(continuation.caches)
    for policy in speculations:
        rate, probs_NV = continuation.by_cache(engine.model, next(caches), args.gamma2)
        found[policy].append(rate)
        for name, model in copies.items():
            by_copy, copy_NV = continuation.by_cache(model, next(caches), args.gamma2)
            found[f"{policy} {name}"].append(by_copy)
            found[f"{policy} {name} overlap"].append(overlap(copy_NV, probs_NV))
        if draft_NV is not None:
            rate = expected_rate(draft_NV, probs_NV, args.gamma1)
            found[f"draft {policy}"].append(rate)
        print(f"  {policy} {rate[0]:.3f}", file=sys.stderr, flush=True)


@torch.inference_mode()
def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    names = list(dict.fromkeys(args.policy or ["all"]))
    names, args.policy = list(NAMES) if "all" in names else names, "retrieval"
    if args.gamma1 is None or args.gamma2 is None:
        raise InputError("gamma1 or gamma2 is auto; give numbers, such as --gamma1 3 --gamma2 3")
    settings, files = arguments.speculation_of(args), args.prompt_file or [None]
    texts = [read_prompt(file) for file in files]
    draft = "ngram" if args.draft == "none" else args.draft
    engine = load(**arguments.model_of(args) | {"draft": draft})
    if args.draft != "none" and engine.models.draft is None:
        raise InputError(
            f"--draft {args.draft} is no model; only a drafter with distributions of its own "
            "can be measured"
        )
    titles = [Path(file).stem if file else "demo" for file in files]
    copies = {name: rounded_copy(engine.model, args, name) for name in args.copy}
    found: defaultdict[str, list[Rate]] = defaultdict(list, {name: [] for name in names})
    speculations = {name: speculation_with(name, settings) for name in names}
    for title, text in zip(titles, texts, strict=True):
        prompt = engine.tokenizer.encode(text)[: args.prompt_tokens]
        check_prompt(prompt, engine.config, args.new_tokens)
        print(f"{title}: {len(prompt)} tokens", file=sys.stderr, flush=True)
        measure(engine, prompt, args, speculations, copies, found)
    show(engine, args, titles, found)


def show(
    engine: Engine, args: argparse.Namespace, titles: list[str], found: dict[str, list[Rate]]
) -> None:
    """Prints the rates, a row per kind of guesses, and the same as JSON."""
    print(
        f"{args.prompt_tokens} prompt tokens, {args.new_tokens} new, budget {args.budget}, gammas "
        f"{args.gamma1}, {args.gamma2}, temperature {args.temperature}, top-p {args.top_p}, "
        f"{engine.model.dtype}; expected accepted / tested, with its standard error"
    )
    header = "  ".join(f"{title:>14s}" for title in titles)
    width = max(15, *map(len, found))
    print(f"{'policy':{width}s} {'mean':>6s}  {header}")
    means = {name: statistics.mean(rate for rate, _ in row) for name, row in found.items()}
    for name, row in found.items():
        cells = [
            f"{rate:6.3f} +- {error:.3f}".rjust(max(len(title), 14))
            for title, (rate, error) in zip(titles, row, strict=True)
        ]
        print(f"{name:{width}s} {means[name]:6.3f}  " + "  ".join(cells))
    keys = ("prompt_tokens", "new_tokens", "budget", "gamma1", "gamma2", "temperature", "top_p")
    result = {key: getattr(args, key) for key in (*keys, "seed", "rope_scaling")}
    result |= {"dtype": str(engine.model.dtype).removeprefix("torch."), "texts": titles}
    result |= {"acceptance": {name: [rate for rate, _ in row] for name, row in found.items()}}
    result |= {"standard_error": {name: [error for _, error in row] for name, row in found.items()}}
    print(json.dumps({**result, "mean": means}))


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
