"""How many guesses of the small KV cache the target accepts, for each rule of what that cache holds, and how many of a
drafter.

    python tools/acceptance.py --prompt-file A --prompt-file B --prompt-tokens 8000 --budget 1024 --policy all

Reads the first tokens of every text once and lets the target continue it, remembering the law of every token. Then the
same continuation is put through a retrieval cache of each policy, `gamma2` tokens between two commits as the method
`retrieval` would, and through the drafter, `gamma1` tokens between two commits. What is printed is the expected
acceptance rate: a guess drawn from a law q is accepted by the law p with probability sum(min(p, q)), and tested if all
before it in its block were accepted. So no draw adds its noise, and every policy meets the same tokens: differences are
much better known than the rates, of which the standard error is given. The last line is JSON.

Rows: a policy's name (guesses of the small cache, accepted by the full one), `draft` (the drafter's, by the full cache,
as in the method naive) and `draft POLICY` (the drafter's, by the small cache, as in triforce).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minitri.caches import FullCache
from minitri.caches.policies import make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.draft_runner import DraftReader
from minitri.engine import Engine, load
from minitri.errors import InputError
from minitri.cli.exits import clean_exits
from minitri.cli.arguments import OneLineParser, add_model_flags, add_sampling_flags, add_size_flags, positive, speculation_of
from minitri.generate import encode_prompt, read_prompt
from minitri.model.llama import Llama
from minitri.runner import Reader, prefill
from minitri.decoding.sampling import sample
from minitri.settings import POLICIES, SamplingParams, SpeculationConfig


def build_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__)
    add_model_flags(parser)
    parser.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="UTF-8 text; may be given several times (default: "
        "Python's help)",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=positive, default=8000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--policy", action="append", choices=(*POLICIES, "all"), help="may be given several times (default: all)"
    )
    parser.add_argument(
        "--draft", default="none", metavar="auto|NAME|DIR|none", help="also measure this drafter; auto is the one that "
        "belongs to the model (default: %(default)s)",
    )  # fmt: skip
    add_sampling_flags(parser)
    add_size_flags(parser.add_argument_group("speculation"))
    parser.set_defaults(
        gamma1=3,
        gamma2=3,
        seed=0,
        temperature=0.6,
        top_p=0.9,
        budget=1024,
        prompt=None,
        method="retrieval",
        coupled=False,
    )
    return parser


Rate = tuple[float, float]
"""An acceptance rate and its standard error."""


class Continuation:
    """A prompt, what the target said behind it, and the full cache, laws and queries of every token of that."""

    def __init__(
        self, engine: Engine, prompt: list[int], args: argparse.Namespace, speculations: list[SpeculationConfig]
    ) -> None:
        """Has the retrieval caches of all settings observe the prompt."""
        model, config, num_new = engine.model, engine.config, args.new_tokens
        self.model, self.num_prompt = model, len(prompt)
        self.sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p)
        room = speculations[0].max_block
        self.full = FullCache.allocate(config, 1, len(prompt) + num_new + room, dtype=model.dtype, device=model.device)
        self.caches = [
            RetrievalCache(
                self.full, make_policy(speculation.policy, self.full, speculation.chunk_size), speculation,
                budgets=[speculation.budget_for(len(prompt))], num_heads=config.num_heads,
            )
            for speculation in speculations
        ]  # fmt: skip

        def watch(queries_LTHD: Tensor) -> None:
            for cache in self.caches:
                cache.observe(0, queries_LTHD)

        started = time.perf_counter()
        for done in prefill(model, prompt, self.full, 0, chunk=1024, watch=watch):
            print(f"\r  read {done + 1} of {len(prompt)} tokens", end="", file=sys.stderr, flush=True)
        print(f", {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        self.speculation = speculations[0]
        self.tokens = list(prompt)
        shape = (config.num_layers, 1, 1, config.num_heads, config.head_dim)
        query = torch.empty(shape, dtype=model.dtype, device=model.device)
        reader = Reader(model, self.full, self.sampling, vocab_size=config.vocab_size, queries_LBTHD=query)
        generator = torch.Generator().manual_seed(args.seed)
        laws, queries = [], []
        for _ in range(num_new):
            laws.append(reader.read([self.tokens], [0], [True])[0, -1])
            queries.append(query[:, 0].clone())
            uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(model.device)
            self.tokens.append(int(sample(laws[-1][None], uniform)))
        self.laws_NV = torch.stack(laws)
        """Row i: the law of the i-th new token."""
        self.queries_LNHD = torch.cat(queries, 1)
        """Those of the last prompt token and of every new token but the last."""

    def by_cache(self, cache: RetrievalCache, gamma2: int) -> tuple[Rate, Tensor]:
        """How many of a retrieval cache's guesses the target accepts, and the cache's laws (N, V) of the new tokens."""
        reader = Reader(self.model, cache, self.sampling, vocab_size=self.laws_NV.shape[1])
        self.full.crop([self.num_prompt - 1])

        def commit(num_tokens: int) -> None:
            first = self.full.lengths[0] - (self.num_prompt - 1)
            queries_LTHD = self.queries_LNHD[:, first : num_tokens - self.num_prompt]
            self.full.advance([queries_LTHD.shape[1]])
            cache.commit(0, queries_LTHD, was_rejected=False)

        laws_NV = self._laws(reader, commit, gamma2)
        return expected_rate(laws_NV, self.laws_NV, gamma2), laws_NV

    def by_drafter(self, drafter: Llama, gamma1: int) -> Tensor:
        """The drafter's laws (N, V) of the new tokens."""
        naive = dataclasses.replace(self.speculation, method="naive", gamma1=gamma1)
        reader = DraftReader(drafter, 1, self.sampling, naive, vocab_size=self.laws_NV.shape[1])
        return self._laws(reader, lambda num_tokens: reader.commit([self.tokens[:num_tokens]], [True]), gamma1)

    def _laws(self, reader: Reader, commit: Callable[[int], None], gamma: int) -> Tensor:
        """A stage's laws of the new tokens, as far as whole blocks go: its cache learns of gamma + 1 tokens at once."""
        laws = [self.laws_NV[:1]]
        while sum(map(len, laws)) + gamma < len(self.laws_NV):
            num_known = self.num_prompt + sum(map(len, laws))
            commit(num_known)
            laws.append(reader.read([self.tokens[: num_known + gamma]], [gamma], [True])[0])
        return torch.cat(laws)


def expected_rate(laws_NV: Tensor, verifier_NV: Tensor, gamma: int) -> Rate:
    """Expected accepted over expected tested guesses, gamma at a time, of which the verifier adds one, and the standard
    error of that."""
    accepted, tested = [], []
    for i in range(1, min(len(laws_NV), len(verifier_NV)) - gamma, gamma + 1):
        overlap_N = torch.minimum(laws_NV[i : i + gamma], verifier_NV[i : i + gamma]).sum(1)
        survival = overlap_N.clamp(max=1).cumprod(0).tolist()
        accepted.append(sum(survival))
        tested.append(1 + sum(survival[:-1]))
    rate = sum(accepted) / sum(tested)
    misses = [a - rate * t for a, t in zip(accepted, tested, strict=True)]
    return rate, math.sqrt(sum(miss * miss for miss in misses)) / sum(tested)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    names = list(POLICIES) if not args.policy or "all" in args.policy else list(dict.fromkeys(args.policy))
    args.policy = names[0]
    if args.gamma1 is None or args.gamma2 is None:
        raise InputError("gamma1 or gamma2 is auto; give numbers, such as --gamma1 3 --gamma2 3")
    speculation = speculation_of(args)
    files = args.prompt_file or [None]
    texts = [read_prompt(argparse.Namespace(prompt=None, prompt_file=file)) for file in files]
    engine = load(
        args.model, draft="ngram" if args.draft == "none" else args.draft, dtype=args.dtype, device=args.device,
        attention=args.attention, rope_scaling=args.rope_scaling,
    )  # fmt: skip
    if args.draft != "none" and engine.draft is None:
        raise InputError(f"--draft {args.draft} is no model; only a drafter with laws of its own can be measured")
    titles = [Path(file).stem if file else "demo" for file in files]
    found: dict[str, list[Rate]] = {name: [] for name in names}
    if engine.draft is not None:
        found |= {"draft": [], **{f"draft {name}": [] for name in names}}
    speculations = [dataclasses.replace(speculation, policy=name) for name in names]
    for title, text in zip(titles, texts, strict=True):
        prompt = encode_prompt(engine, text, args.prompt_tokens)
        engine.check_prompt(prompt, args.new_tokens)
        print(f"{title}: {len(prompt)} tokens", file=sys.stderr, flush=True)
        continuation = Continuation(engine, prompt, args, speculations)
        draft_NV = None
        if engine.draft is not None:
            draft_NV = continuation.by_drafter(engine.draft, args.gamma1)
            found["draft"].append(expected_rate(draft_NV, continuation.laws_NV, args.gamma1))
        for name, cache in zip(names, continuation.caches, strict=True):
            rate, laws_NV = continuation.by_cache(cache, args.gamma2)
            found[name].append(rate)
            if draft_NV is not None:
                found[f"draft {name}"].append(expected_rate(draft_NV, laws_NV, args.gamma1))
            print(f"  {name} {rate[0]:.3f}", file=sys.stderr, flush=True)
    print(
        f"{args.prompt_tokens} prompt tokens, {args.new_tokens} new, budget {args.budget}, gammas {args.gamma1}, "
        f"{args.gamma2}, temperature {args.temperature}, top-p {args.top_p}, {engine.model.dtype}; "
        "expected accepted / tested, with its standard error"
    )
    print(f"{'policy':15s} {'mean':>6s}  " + "  ".join(f"{title:>14s}" for title in titles))
    for name, row in found.items():
        cells = [
            f"{rate:6.3f} +- {error:.3f}".rjust(max(len(title), 14))
            for title, (rate, error) in zip(titles, row, strict=True)
        ]
        print(f"{name:15s} {statistics.mean(rate for rate, _ in row):6.3f}  " + "  ".join(cells))
    keys = ("prompt_tokens", "new_tokens", "budget", "gamma1", "gamma2", "temperature", "top_p", "seed", "rope_scaling")
    result = {key: getattr(args, key) for key in keys}
    result |= {"dtype": str(engine.model.dtype).removeprefix("torch."), "texts": titles}
    result |= {"acceptance": {name: [rate for rate, _ in row] for name, row in found.items()}}
    result |= {"standard_error": {name: [error for _, error in row] for name, row in found.items()}}
    result |= {"mean": {name: statistics.mean(rate for rate, _ in row) for name, row in found.items()}}
    print(json.dumps(result))


if __name__ == "__main__":
    with clean_exits():
        main()
