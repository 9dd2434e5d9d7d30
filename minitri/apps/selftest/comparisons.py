"""The comparisons of the self-test: one engine, one prompt, all methods.

Rounding explains why two texts part if both tokens score within `bound` of the best one there:
twice the largest difference between logits computed alone and at the end of a block, but at least
the spacing of the dtype's numbers, divided by the temperature where tokens are sampled.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minitri import Engine, GenerationConfig, SamplingParams
from minitri.apps.cli import arguments
from minitri.apps.selftest.distribution_test import (
    FALSE_ALARM,
    is_alarm,
    last_logits,
    run_test,
    windows,
)
from minitri.core.decoding.noise import gumbel, noise_keys
from minitri.core.log import log
from minitri.core.model.llama import Llama
from minitri.core.stats import num_common

Result = dict[str, Any]
"""What was found out about a method, by the names of columns."""

WINDOW = 64
NEW_TOKENS = 64
"""Of the statistical test: tokens that a text begins with, and tokens that it goes on for."""


def is_bitwise(engine: Engine, args: argparse.Namespace) -> bool:
    """Whether no difference is explained by rounding."""
    return engine.model.execution.is_row_invariant and not args.tree


def compare_texts(
    engine: Engine, prompt: list[int], args: argparse.Namespace, methods: Sequence[str]
) -> Iterator[Result]:
    """Greedy and coupled texts of every method against those of autoregressive decoding."""
    settings = arguments.speculation_of(args)
    same = {"generation": arguments.taken(GenerationConfig, args), "seed": args.seed}
    for mode, temperature in (("greedy", 0.0), ("coupled", args.temperature)):
        texts: list[list[int]] = []
        for method in ("autoregressive", *methods):
            speculation = dataclasses.replace(settings, method=method, coupled=mode == "coupled")
            how = {"temperature": temperature, "speculation": speculation}
            texts.append(list(engine.complete(prompt, **how, **same).token_ids))
            if method == "autoregressive":
                continue
            expected, *_, got = texts
            n = num_common(expected, got)
            found: Result = {"mode": mode, "method": method, "verdict": "equal"}
            found |= {"num_tokens": len(got), "num_equal_tokens": n}
            if n < len(got):
                engine.release()
                what = (prompt + got[:n], [expected[n], got[n]], speculation.max_block)
                found |= explain(engine.model, *what, temperature, args.seed)
                is_tie = found["score_gap"] <= found["bound"] and not is_bitwise(engine, args)
                found["verdict"] = "tie" if is_tie else "BUG"
            yield found


def explain(
    model: Llama, sequence: list[int], tokens: list[int], block: int, temperature: float, seed: int
) -> Result:
    """Compares the scores after `sequence` of two `tokens`, the expected one and the one that came.

    `score_gap` is how far the worse of them scores below the best of all; `bound`, what rounding
    explains of that. Blocks have `block` tokens.
    """
    widths = (1, min(block, len(sequence)))
    logits_2V = torch.stack([last_logits(model, sequence, width)[-1] for width in widths])
    spacing = torch.finfo(model.dtype).eps * logits_2V[0].abs().max()
    error = logits_2V.diff(dim=0).abs().max().maximum(spacing)
    scores_V = scores(logits_2V[0], temperature, seed, len(sequence))
    return {
        "position": len(sequence),
        "expected": tokens[0],
        "got": tokens[1],
        "score_gap": float(scores_V.max() - scores_V[tokens].min()),
        "bound": 2 * float(error) / (temperature or 1.0),
    }


def scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What the token at a position is the argmax of, in float64 and up to a constant: the logits,
    or the logarithm of the distribution plus Gumbel noise."""
    if not temperature:
        return logits_V.double()
    tokens = torch.arange(len(logits_V), device=logits_V.device)
    key = noise_keys(seed, torch.tensor(position)).to(tokens.device)
    return logits_V.double() / temperature + gumbel(key, tokens)


def compare_samples(
    engine: Engine, prompt: list[int], args: argparse.Namespace, methods: Sequence[str]
) -> Iterator[Result]:
    """The statistical test of every method; none at temperature 0."""
    sampling = arguments.taken(SamplingParams, args)
    settings = arguments.speculation_of(args)
    is_exact = is_bitwise(engine, args) or engine.model.dtype == torch.float32
    num_rows = -(-args.num_samples // NEW_TOKENS)
    prompts = windows(prompt, num_rows, WINDOW)
    # A cache so small that the guesses of the retrieval level are often wrong.
    budget = settings.budget or 4 * settings.chunk_size
    if not prompts or not sampling.temperature:
        return
    log.info("a false alarm in the samples has odds of 1 in %.0f", 1 / FALSE_ALARM)
    for method in methods:
        speculation = dataclasses.replace(settings, method=method, budget=budget)
        p_values = run_test(
            engine, prompts, sampling, speculation, num_new=NEW_TOKENS, seed=args.seed
        )
        alarm = "BUG" if is_exact else "unclear"
        yield {
            "mode": "sampled",
            "method": method,
            "verdict": alarm if is_alarm(p_values, len(methods)) else "consistent",
            "num_tokens": num_rows * NEW_TOKENS,
            "least_p_value": min(p_values.values()),
            "p_values": p_values,
        }
