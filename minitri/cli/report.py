"""What a run did, in words for people and in numbers for programs."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from minitri.cli.arguments import WITH_DRAFTER
from minitri.engine import Engine
from minitri.generation import Generation
from minitri.loading.devices import attention_name
from minitri.model.llama import Llama
from minitri.requests import Token
from minitri.roofline import CPU, GPU
from minitri.stats import LevelStats, Stats

GUESSED = ("draft", "retrieval")
"""Origins of tokens that the target only verified."""


def where(model: Llama) -> dict[str, str]:
    """What a model runs on: a part of every JSON line."""
    names = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    return {**names, "attention": attention_name(model.attend), "torch": torch.__version__}


def outline(engine: Engine, run: Generation) -> str:
    """The statistics for people, in a line."""
    stats = run.stats
    total = run.stats.num_generated_tokens
    seconds = stats.prefill_seconds + stats.decode_seconds
    line = f"{total} tokens in {seconds:.2f} s, {stats.prefill_seconds:.2f} s of it for the prompt"
    if stats.tokens_per_second is not None:
        line += f", decoded at {stats.tokens_per_second:.1f} tokens/s"
    if (gain := speedup(engine, run)) is not None:
        line += f", about {gain:.1f} times as fast as without speculation"
    if total and stats.levels:
        counts = [row.stats.by_origin.get(name, 0) for row in run.rows for name in GUESSED]
        line += f", {sum(counts) / total:.0%} guessed"
    return line


def speedup(engine: Engine, run: Generation) -> float | None:
    """Speed of decoding over that of the target alone, by estimate; None if there is none.

    Passes of the target were measured as they verified guesses. Without them they take less, by
    the machine's nominal share for each (`roofline.py`). Of batches nothing is known.
    """
    stats = run.stats
    machine = GPU if engine.model.device.type == "cuda" else CPU
    target = stats.stages[-1]
    if len(run.rows) > 1 or not target.num_draft_tokens or not stats.decode_seconds:
        return None
    num_guesses = target.num_draft_tokens / target.num_rounds
    per_pass = target.seconds / target.num_rounds
    alone = per_pass / (1 + machine.share_per_extra_token * num_guesses)
    return alone * stats.num_decoded_tokens / stats.decode_seconds


def details(engine: Engine, run: Generation) -> str:
    """The statistics for people who tune: of --stats."""
    stats = run.stats
    lines = []
    if seconds := stats.prefill_seconds:
        count = f"{stats.num_prefilled_tokens} of {stats.num_prompt_tokens} tokens"
        rate = f"{stats.num_prefilled_tokens / seconds:.0f} tokens/s"
        lines.append(f"prefill  {count} in {seconds:.2f} s, {rate}")
    if stats.ms_per_token is not None:
        count = f"{stats.num_decoded_tokens} tokens after the first"
        rate = f"{stats.ms_per_token:.1f} ms/token, {stats.tokens_per_second:.1f} tokens/s"
        lines.append(f"decode   {count} in {stats.decode_seconds:.2f} s, {rate}")
    lines += [level_line(level) for level in stats.levels if level.num_rounds]
    if stats.levels and stats.num_decoded_tokens:
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in phase_ms(stats).items())
        lines.append(f"ms/token {phases}; {stats.num_rebuilds} rebuilds of the retrieval cache")
    if len(stats.steps_per_plan) > 1:
        most_used = sorted(stats.steps_per_plan.items(), key=lambda item: -item[1])
        lines.append("plans    " + ", ".join(f"{plan}: {steps} steps" for plan, steps in most_used))
    if stats.num_graphs:
        size = f"{stats.graph_bytes / 1e6:.0f} MB; attention {attention_name(engine.model.attend)}"
        lines.append(
            f"graphs   {stats.num_graphs} captured in {stats.capture_seconds:.2f} s, {size}"
        )
    models = (engine.model, engine.draft, engine.retrieval_model)
    weights = sum(model.num_bytes for model in models if model is not None)
    caches = f"KV caches {stats.kv_cache_bytes / 1e6:.0f} MB"
    return "\n".join([*lines, f"memory   weights {weights / 1e6:.0f} MB, {caches}"])


def level_line(level: LevelStats) -> str:
    """One level: what it accepted."""
    if level.acceptance_rate is None:
        return f"{level.name:8s} {level.num_rounds} rounds, nothing was guessed for it"
    return (
        f"{level.name:8s} accepted {level.num_accepted_tokens} of {level.num_tested_tokens} tested "
        f"({level.acceptance_rate:.3f}) of {level.num_draft_tokens} drafted in {level.num_rounds} "
        f"rounds, {level.mean_acceptance_length:.2f} tokens each"
    )


def phase_ms(stats: Stats) -> dict[str, float]:
    """Milliseconds per decoded token of each stage, and of commits, rebuilds included."""
    seconds = {stage.name: stage.seconds for stage in stats.stages}
    seconds["commit"] = stats.commit_seconds
    tokens = max(stats.num_decoded_tokens, 1)
    return {name: 1e3 * value / tokens for name, value in seconds.items()}


def log_probs(tokens: Sequence[Token]) -> dict[str, Any]:
    """What --logprobs adds to the report of a text: for each token its own, and the likeliest."""
    if not tokens or tokens[0].logprob is None:
        return {}
    likeliest = [token.top_logprobs for token in tokens]
    return {"logprobs": [token.logprob for token in tokens], "top_logprobs": likeliest}


def report(
    engine: Engine,
    run: Generation,
    args: argparse.Namespace,
    finish_reason: str,
    tokens: Sequence[Token],
) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    row = run.rows[0]
    stats = run.stats
    flags = ("model", "method", "temperature", "coupled", "seed")
    numbers = ["num_prompt_tokens", "num_generated_tokens", "prefill_seconds", "decode_seconds"]
    numbers += ["ms_per_token", "tokens_per_second", "steps_per_plan", "kv_cache_bytes"]
    return {
        **{name: getattr(args, name) for name in flags},
        **{name: getattr(stats, name) for name in numbers},
        **where(engine.model),
        "text": row.text,
        "token_ids": row.token_ids,
        "finish_reason": finish_reason,
        "draft": engine.drafter_name if args.method in WITH_DRAFTER else None,
        "num_cached_tokens": row.stats.num_cached_tokens,
        "tokens_by_origin": row.stats.by_origin,
        "speedup_estimate": speedup(engine, run),
        "levels": [level.as_dict() for level in stats.levels],
        "phase_ms_per_token": phase_ms(stats),
        "num_rebuilds": stats.num_rebuilds,
        "num_cuda_graphs": stats.num_graphs,
        **log_probs(tokens),
    }
