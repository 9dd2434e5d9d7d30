"""What a run did, in words for people and in numbers for programs."""

from __future__ import annotations

import argparse
from typing import Any

from minitri.decoding.stats import LevelStats, Stats
from minitri.engine import Engine
from minitri.generation import Generation
from minitri.loading.devices import attention_name


def summary(engine: Engine, run: Generation) -> str:
    """The statistics for people."""
    stats, lines = run.stats, []
    if stats.prefill_seconds:
        rate = stats.num_prefilled_tokens / stats.prefill_seconds
        lines.append(
            f"prefill  {stats.num_prefilled_tokens} of {stats.num_prompt_tokens} tokens in "
            f"{stats.prefill_seconds:.2f} s, {rate:.0f} tokens/s"
        )
    if stats.ms_per_token is not None:
        lines.append(
            f"decode   {stats.num_decoded_tokens} tokens after the first in "
            f"{stats.decode_seconds:.2f} s, {stats.ms_per_token:.1f} ms/token, "
            f"{stats.tokens_per_second:.1f} tokens/s"
        )
    lines += [level_line(level) for level in stats.levels if level.num_rounds]
    if stats.levels and stats.num_decoded_tokens:
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in phase_ms(stats).items())
        lines.append(f"ms/token {phases}; {stats.rebuilds.count} rebuilds of the retrieval cache")
    lines += plan_lines(stats)
    if stats.num_graphs:
        lines.append(
            f"graphs   {stats.num_graphs} captured in {stats.capture_seconds:.2f} s, "
            f"{stats.graph_bytes / 1e6:.0f} MB; attention {attention_name(engine.model.attend)}"
        )
    weights = engine.model.num_bytes + (engine.draft.num_bytes if engine.draft else 0)
    caches = f"KV caches {stats.kv_cache_bytes / 1e6:.0f} MB"
    return "\n".join([*lines, f"memory   weights {weights / 1e6:.0f} MB, {caches}"])


def plan_lines(stats: Stats) -> list[str]:
    """The plans that were used, if there were several, and when the last one gains speed."""
    if len(stats.steps_per_plan) < 2 and stats.break_even is None:
        return []
    most_used = sorted(stats.steps_per_plan.items(), key=lambda item: -item[1])
    lines = ["plans    " + ", ".join(f"{plan}: {steps} steps" for plan, steps in most_used)]
    if stats.break_even is not None:
        lines.append(
            f"         as fast as the model alone if {stats.break_even:.2f} of the last plan's "
            "guesses are accepted"
        )
    return lines


def level_line(level: LevelStats) -> str:
    """One level: what it accepted, and how that fell off along a block."""
    if level.acceptance_rate is None:
        return f"{level.name:8s} {level.num_rounds} rounds, nothing was guessed for it"
    per_position = zip(level.accepted_per_position, level.tested_per_position, strict=True)
    rates = " ".join(f"{accepted / tested:.2f}" for accepted, tested in per_position if tested)
    return (
        f"{level.name:8s} accepted {level.num_accepted_tokens} of {level.num_tested_tokens} tested "
        f"({level.acceptance_rate:.3f}) of {level.num_draft_tokens} drafted in {level.num_rounds} "
        f"rounds, {level.mean_acceptance_length:.2f} tokens each; by position {rates}"
    )


def phase_ms(stats: Stats) -> dict[str, float]:
    """Milliseconds per decoded token of each stage, of rebuilds, and of other commits."""
    rebuild_seconds = stats.rebuilds.seconds
    seconds = {stage.name: stage.seconds for stage in stats.stages}
    seconds |= {"rebuild": rebuild_seconds, "commit": stats.commit_seconds - rebuild_seconds}
    return {name: 1e3 * value / max(stats.num_decoded_tokens, 1) for name, value in seconds.items()}


def report(
    engine: Engine, run: Generation, args: argparse.Namespace, finish_reason: str
) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    row, stats = run.rows[0], run.stats
    draft = engine.draft.config.name if engine.draft else "ngram"
    return {
        "model": args.model, "method": args.method, "text": row.text, "token_ids": row.token_ids,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_generated_tokens": stats.num_generated_tokens, "finish_reason": finish_reason,
        "seed": args.seed or 0, "temperature": args.temperature,
        "dtype": str(engine.model.dtype).removeprefix("torch."), "device": str(engine.model.device),
        "attention": attention_name(engine.model.attend), "num_cuda_graphs": stats.num_graphs,
        "prefill_seconds": stats.prefill_seconds, "decode_seconds": stats.decode_seconds,
        "ms_per_token": stats.ms_per_token, "tokens_per_second": stats.tokens_per_second,
        "levels": [level.as_dict() for level in stats.levels],
        "draft": draft if args.method in ("auto", "naive", "triforce") else None,
        "policy": args.policy, "coupled": args.coupled, "phase_ms_per_token": phase_ms(stats),
        "num_rebuilds": stats.rebuilds.count, "steps_per_plan": stats.steps_per_plan,
        "break_even_acceptance": stats.break_even, "kv_cache_bytes": stats.kv_cache_bytes,
    }  # fmt: skip
