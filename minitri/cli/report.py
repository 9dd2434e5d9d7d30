"""What a run did, in words for people and in numbers for programs."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from minitri import Engine, Generation, Stats, Token
from minitri.cli.arguments import WITH_DRAFTER
from minitri.loading.devices import attention_name
from minitri.model.llama import Llama
from minitri.requests import Row
from minitri.stats import LevelStats

GUESSED = ("draft", "retrieval")
"""Origins of tokens that the target only verified."""


def where(model: Llama) -> dict[str, str]:
    """What a model runs on: a part of every JSON line."""
    names = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    return {**names, "attention": attention_name(model.attend), "torch": torch.__version__}


def outline(run: Generation) -> str:
    """The statistics for people, in a line."""
    stats = run.stats
    total = stats.num_generated_tokens
    seconds = stats.prefill_seconds + stats.decode_seconds
    line = f"{total} tokens in {seconds:.2f} s, {stats.prefill_seconds:.2f} s of it for the prompt"
    if stats.tokens_per_second is not None:
        line += f", decoded at {stats.tokens_per_second:.1f} tokens/s"
    if total and stats.levels:
        counts = [row.stats.by_origin.get(name, 0) for row in run.rows for name in GUESSED]
        line += f", {sum(counts) / total:.0%} guessed"
    return line


def details(engine: Engine, run: Generation) -> str:
    """The statistics for people who tune: of --stats."""
    stats = run.stats
    phases = ", ".join(f"{name} {ms:.1f}" for name, ms in phase_ms(stats).items())
    plans = ", ".join(f"{plan}: {steps} steps" for plan, steps in stats.steps_per_plan.items())
    models = (engine.model, engine.draft, engine.retrieval_model)
    weights = sum(model.num_bytes for model in models if model is not None)
    lines = [
        f"prefill  {stats.num_prefilled_tokens} of {stats.num_prompt_tokens} tokens in "
        f"{stats.prefill_seconds:.2f} s",
        f"decode   {stats.num_decoded_tokens} tokens after the first in "
        f"{stats.decode_seconds:.2f} s, {stats.ms_per_token or 0:.1f} ms/token",
        *map(level_line, stats.levels),
        f"ms/token {phases}; {stats.num_rebuilds} rebuilds of the retrieval cache",
        f"plans    {plans}",
        f"graphs   {stats.num_graphs}",
        f"memory   weights {weights / 1e6:.0f} MB, KV caches {stats.kv_cache_bytes / 1e6:.0f} MB",
    ]
    return "\n".join(lines)


def level_line(level: LevelStats) -> str:
    """One level: what it accepted."""
    return (
        f"{level.name:8s} accepted {level.num_accepted_tokens} of {level.num_tested_tokens} tested "
        f"({level.acceptance_rate or 0:.3f}) of {level.num_draft_tokens} drafted in "
        f"{level.num_rounds} rounds, {level.mean_acceptance_length or 0:.2f} tokens each"
    )


def phase_ms(stats: Stats) -> dict[str, float]:
    """Milliseconds per decoded token of each stage, and of commits, rebuilds included."""
    seconds = {stage.name: stage.seconds for stage in stats.stages}
    seconds["commit"] = stats.commit_seconds
    return {name: 1e3 * it / max(stats.num_decoded_tokens, 1) for name, it in seconds.items()}


def answer(row: Row, finish_reason: str, tokens: Sequence[Token]) -> dict[str, Any]:
    """A text as a part of JSON; with --logprobs each token's own, and the likeliest."""
    found = {
        "text": row.text,
        "token_ids": row.token_ids,
        "finish_reason": finish_reason,
        "seed": row.request.seed,
        "temperature": row.request.sampling.temperature,
        "num_prompt_tokens": len(row.prompt),
    }
    if row.request.generation.logprobs is not None:
        found["logprobs"] = [token.logprob for token in tokens]
        found["top_logprobs"] = [token.top_logprobs for token in tokens]
    return found


def report(
    engine: Engine,
    run: Generation,
    args: argparse.Namespace,
    finish_reason: str,
    tokens: Sequence[Token],
) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    [row] = run.rows
    stats = run.stats
    return {
        "model": args.model,
        "method": args.method,
        "coupled": args.coupled,
        "draft": engine.drafter_name if args.method in WITH_DRAFTER else None,
        **where(engine.model),
        **answer(row, finish_reason, tokens),
        **vars(row.stats),
        **vars(stats),
        "ms_per_token": stats.ms_per_token,
        "tokens_per_second": stats.tokens_per_second,
        "stages": [vars(stage) for stage in stats.stages],
        "levels": [level.as_dict() for level in stats.levels],
    }
