"""Guesses accepted by token and by block verification, on real weights.

    python tools/verification_acceptance.py --prompt-file novel.txt --prompt-file other.txt

Each method runs with either verification. For every round that verifies guesses the chance is
computed that the first i of them stay, given the guesses: the product of min(p / q, 1) token by
token, min(w p / q, 1) by block. Their sums are the expected numbers of accepted guesses, without
the noise of the tests. `same guesses` is what the other verification would have accepted of those
of the token runs, with the standard error of the gain. The last line is JSON.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig, load
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.verification import Proposal
from minitri.core.requests import Request
from minitri.core.settings import VERIFICATIONS
from tools.runs import begin

PLANS = {
    "naive, gamma1 4": ("naive", 4, None),
    "naive, gamma1 8": ("naive", 8, None),
    "retrieval, gamma2 8": ("retrieval", None, 8),
    "triforce, gammas 3, 8": ("triforce", 3, 8),
}


class WatchedSource(IndependentSource):
    """Notes how many guesses of row 0 each verification is expected to accept."""

    def __init__(self, seed: int, verification: str) -> None:
        super().__init__(verification)
        self.restart(0, seed)
        self.expected: list[tuple[float, float]] = []
        """Of every round with guesses: by token, by block."""

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> list[list[int]]:
        by_token = by_block = 1.0
        accepted = [0.0, 0.0]
        for i, token in enumerate(proposal.tokens[0]):
            ratio = float(probs_BNV[0, i, token]) / float(proposal.probs_BNV[0, i, token])
            by_token *= min(ratio, 1)
            by_block = min(by_block * ratio, 1)
            accepted = [accepted[0] + by_token, accepted[1] + by_block]
        if proposal.tokens[0]:
            self.expected.append((accepted[0], accepted[1]))
        return super().verify(proposal, probs_BNV, starts, active)


@torch.inference_mode()
def run(
    engine: Engine,
    prompt: list[int],
    seed: int,
    temperature: float,
    num_new: int,
    speculation: SpeculationConfig,
) -> tuple[dict[str, WatchedSource], int]:
    """The sources of the levels that verify, and the steps that `num_new` tokens took."""
    sampling, generation = SamplingParams(temperature), GenerationConfig(num_new)
    request = Request(prompt, seed, sampling, generation)
    names = ["target"] + ["retrieval"] * (speculation.method == "triforce")
    sources = {
        name: WatchedSource(10 * seed + i, speculation.verification)
        for i, name in enumerate(names, 1)
    }
    own: dict[str, Any] = {"retrieval": IndependentSource(), **sources}
    own["retrieval"].restart(0, 10 * seed)
    session = begin(engine.models, [request], speculation, sources=own)
    for _ in session.prefill(0):
        pass
    session.start([0])
    num_steps = 0
    while len(session.sequences[0]) < len(prompt) + num_new:
        session.step()
        num_steps += 1
    return sources, num_steps


def compare(
    engine: Engine,
    prompts: list[list[int]],
    args: argparse.Namespace,
    name: str,
    temperature: float,
) -> list[dict[str, object]]:
    """A row per level of a method."""
    method, gamma1, gamma2 = PLANS[name]
    runs = {
        verification: [
            run(
                engine,
                prompt,
                seed,
                temperature,
                args.new_tokens,
                SpeculationConfig(method, gamma1=gamma1, gamma2=gamma2, verification=verification),
            )
            for prompt in prompts
            for seed in range(args.seeds)
        ]
        for verification in VERIFICATIONS
    }
    rows = list[dict[str, object]]()
    for level in runs["token"][0][0]:
        rounds = {
            verification: [pair for sources, _ in found for pair in sources[level].expected]
            for verification, found in runs.items()
        }
        gains = [by_block - by_token for by_token, by_block in rounds["token"]]
        rows.append(
            {
                "method": name,
                "level": level,
                "temperature": temperature,
                "token": statistics.mean(pair[0] for pair in rounds["token"]),
                "same_guesses": statistics.mean(pair[1] for pair in rounds["token"]),
                "error_of_gain": statistics.stdev(gains) / len(gains) ** 0.5,
                "block": statistics.mean(pair[1] for pair in rounds["block"]),
            }
            | {
                f"tokens_by_{verification}": args.new_tokens * len(found) / sum(n for _, n in found)
                for verification, found in runs.items()
            }
        )
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--prompt-file", action="append", required=True, metavar="FILE")
    parser.add_argument("--prompt-tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="runs per prompt")
    args = parser.parse_args()
    engine = load(args.model, dtype="bfloat16")
    texts = [Path(file).read_text(encoding="utf-8") for file in args.prompt_file]
    prompts = [engine.tokenizer.encode(text)[: args.prompt_tokens] for text in texts]
    results = list[dict[str, object]]()
    for temperature in (0.6, 1.0):
        for plan in PLANS:
            for row in compare(engine, prompts, args, plan, temperature):
                results.append(row)
                print(
                    f"T={temperature:<4g} {plan:22s} {row['level']:10s} accepted a round: token "
                    f"{row['token']:.3f}, same guesses by block {row['same_guesses']:.3f} "
                    f"(+- {row['error_of_gain']:.3f}), block {row['block']:.3f}; tokens a step "
                    + ", ".join(f"{row[f'tokens_by_{name}']:.2f}" for name in VERIFICATIONS),
                    flush=True,
                )
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
