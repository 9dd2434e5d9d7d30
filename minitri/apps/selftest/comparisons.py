"""Comparisons of the self-test: one engine, one prompt, every speculative method.

Rounding explains a difference between two texts if both tokens score within `bound` of the best
one: twice the largest difference between logits of a single token and of a whole block, but at
least the spacing of the dtype, divided by the temperature where tokens are sampled.
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
from minitri.core.stats import num_common

Row = dict[str, Any]
"""Result of one comparison, by the columns of the report."""

WINDOW = 64
"""Prompt tokens of each text of the statistical test."""
NEW_TOKENS = 64
"""Sampled tokens of each text of the statistical test."""


def is_bitwise(engine: Engine, args: argparse.Namespace) -> bool:
    """Whether every forward pass rounds alike, so that rounding cannot explain a difference."""
    return engine.model.execution.is_row_invariant and not args.tree


def compare_texts(
    engine: Engine, prompt: list[int], args: argparse.Namespace, methods: Sequence[str]
) -> Iterator[Row]:
    """Compares greedy and coupled texts of every method with those of autoregressive decoding."""
    settings = arguments.speculation_of(args)
    generation = arguments.taken(GenerationConfig, args)
    for mode, temperature in (("greedy", 0.0), ("coupled", args.temperature)):
        expected: list[int] = []
        for method in ("autoregressive", *methods):
            speculation = dataclasses.replace(settings, method=method, coupled=mode == "coupled")
            end = engine.complete(
                prompt,
                temperature=temperature,
                speculation=speculation,
                generation=generation,
                seed=args.seed,
            )
            tokens = list(end.token_ids)
            if method == "autoregressive":
                expected = tokens
                continue
            n = num_common(expected, tokens)
            row: Row = {"mode": mode, "method": method, "verdict": "equal"}
            row |= {"num_tokens": len(tokens), "num_equal_tokens": n}
            if n < len(tokens):
                engine.release()
                sequence = prompt + tokens[:n]
                widths = (1, min(speculation.max_block, len(sequence)))
                one_V, block_V = (last_logits(engine.model, sequence, w)[-1] for w in widths)
                scores_V = scores(one_V, temperature, args.seed, len(sequence))
                gap = float(scores_V.max() - scores_V[[expected[n], tokens[n]]].min())
                bound = rounding(one_V, block_V, engine.model.dtype) / (temperature or 1.0)
                is_tie = gap <= bound and not is_bitwise(engine, args)
                row |= {"verdict": "tie" if is_tie else "BUG", "score_gap": gap, "bound": bound}
            log.info("%s, %s: %s", mode, method, row["verdict"])
            yield row


def rounding(one_V: Tensor, block_V: Tensor, dtype: torch.dtype) -> float:
    """Bound on how far rounding moves two logits apart, from those of two kinds of passes."""
    spacing = torch.finfo(dtype).eps * one_V.abs().max()
    return 2 * float((one_V - block_V).abs().max().maximum(spacing))


def scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Scores whose argmax is the token at a position, in float64 and up to a constant: the logits,
    or for T > 0 log-probabilities plus Gumbel noise."""
    if not temperature:
        return logits_V.double()
    tokens = torch.arange(len(logits_V), device=logits_V.device)
    key = noise_keys(seed, torch.tensor(position)).to(tokens.device)
    return logits_V.double() / temperature + gumbel(key, tokens)


def compare_samples(
    engine: Engine, prompt: list[int], args: argparse.Namespace, methods: Sequence[str]
) -> Iterator[Row]:
    """Runs the statistical test of every method; nothing at temperature 0."""
    sampling = arguments.taken(SamplingParams, args)
    settings = arguments.speculation_of(args)
    # A cache so small that the guesses of the retrieval level are often wrong.
    budget = settings.budget or 4 * settings.chunk_size
    num_rows = -(-args.num_samples // NEW_TOKENS)
    prompts = windows(prompt, num_rows, WINDOW)
    if not prompts or not sampling.temperature:
        return
    is_exact = is_bitwise(engine, args) or engine.model.dtype == torch.float32
    alarm = "BUG" if is_exact else "unclear"
    log.info("a false alarm in the samples has odds of 1 in %.0f", 1 / FALSE_ALARM)
    for method in methods:
        speculation = dataclasses.replace(settings, method=method, budget=budget)
        p_values = run_test(
            engine, prompts, sampling, speculation, num_new=NEW_TOKENS, seed=args.seed
        )
        yield {
            "mode": "sampled",
            "method": method,
            "verdict": alarm if is_alarm(p_values, len(methods)) else "consistent",
            "num_tokens": num_rows * NEW_TOKENS,
            "least_p_value": min(p_values.values()),
            "p_values": p_values,
        }
