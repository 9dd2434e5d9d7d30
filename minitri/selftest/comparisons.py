"""The comparisons of the self-test: one engine, one prompt, all methods."""

import argparse
import dataclasses
from typing import Any

import torch

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.cli import arguments
from minitri.selftest.departures import explain
from minitri.selftest.distribution_test import is_alarm, run_test, windows
from minitri.stats import num_common

WINDOW = 64
NEW_TOKENS = 64
"""Of the statistical test: tokens that a text begins with, and tokens that it goes on for."""


@dataclasses.dataclass
class SelfTest:
    """The comparisons of one engine on one prompt."""

    engine: Engine
    prompt: list[int]
    args: argparse.Namespace

    @property
    def is_bitwise(self) -> bool:
        """Whether no difference is explained by rounding."""
        return self.engine.model.execution.is_row_invariant and not self.args.tree

    def decode(self, speculation: SpeculationConfig, temperature: float) -> list[int]:
        end = self.engine.complete(
            self.prompt,
            sampling=SamplingParams(temperature),
            generation=arguments.taken(GenerationConfig, self.args),
            speculation=speculation,
            seed=self.args.seed,
        )
        return list(end.token_ids)

    def compare(
        self, speculation: SpeculationConfig, temperature: float, expected: list[int]
    ) -> dict[str, Any]:
        """The text of one method against that of autoregressive decoding."""
        got = self.decode(speculation, temperature)
        n = num_common(expected, got)
        counts = {"num_tokens": len(got), "num_equal_tokens": n}
        if n == len(got):
            return {"verdict": "equal", **counts}
        self.engine.release()
        pair = [expected[n], got[n]]
        sequence = self.prompt + got[:n]
        noise = (temperature, self.args.seed)
        found = explain(self.engine.model, sequence, pair, speculation.max_block, *noise)
        is_tie = found["score_gap"] <= found["bound"] and not self.is_bitwise
        return {"verdict": "tie" if is_tie else "BUG", **counts, **found}

    def check_samples(
        self, speculation: SpeculationConfig, sampling: SamplingParams, num_tests: int
    ) -> dict[str, Any]:
        """The statistical test of one method."""
        num_rows = -(-self.args.num_samples // NEW_TOKENS)
        prompts = windows(self.prompt, num_rows, WINDOW)
        # A cache so small that the guesses of the retrieval level are often wrong.
        budget = speculation.budget or 4 * speculation.chunk_size
        speculation = dataclasses.replace(speculation, budget=budget)
        p_values = run_test(
            self.engine, prompts, sampling, speculation, num_new=NEW_TOKENS, seed=self.args.seed
        )
        is_exact = self.is_bitwise or self.engine.model.dtype == torch.float32
        alarm = "BUG" if is_exact else "unclear"
        return {
            "verdict": alarm if is_alarm(p_values, num_tests) else "consistent",
            "num_tokens": num_rows * NEW_TOKENS,
            "least_p_value": min(p_values.values()),
            "p_values": p_values,
        }
