"""What a run did, in words for people and in numbers for programs."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minitri.apps.cli.arguments import UNUSED
from minitri.core.requests import Row

if TYPE_CHECKING:
    from minitri import Engine, Generation
    from minitri.core.model.llama import Llama


def where(model: "Llama") -> dict[str, str]:
    """What a model runs on: a part of every JSON line."""
    import torch  # is there, as the model is

    from minitri.devices.choose import attention_name

    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": attention_name(model.attend),
        "torch": torch.__version__,
    }


def outline(run: "Generation") -> str:
    """The statistics for people, in a line."""
    stats = run.stats
    total = stats.num_generated_tokens
    seconds = stats.prefill_seconds + stats.decode_seconds
    line = f"{total} tokens in {seconds:.2f} s, {stats.prefill_seconds:.2f} s of it for "
    line += f"{stats.num_prefilled_tokens} tokens of the prompt"
    if stats.tokens_per_second is not None:
        line += f", decoded at {stats.tokens_per_second:.1f} tokens/s"
    if total and stats.levels:
        guessers = ("draft", "retrieval")
        counts = [row.stats.by_origin[name] for row in run.rows for name in guessers]
        line += f", {sum(counts) / total:.0%} guessed"
    return line


def as_table(columns: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Lines with a heading: of these columns those that a row has."""
    names = [name for name in columns.split() if any(name in row for row in rows)]
    lines = []
    for row in [{it: it.removeprefix("num_").replace("_", " ") for it in names}, *rows]:
        cells = (row.get(name, "") for name in names)
        texts = (f"{it:.2g}" if isinstance(it, float) else str(it) for it in cells)
        lines.append("".join(f"{text:14}" for text in texts).rstrip())
    return "\n".join(lines)


def answer(row: Row) -> dict[str, Any]:
    """A text as a part of JSON; with --logprobs each token's own, and the likeliest."""
    found: dict[str, Any] = {
        "text": row.text,
        "token_ids": row.token_ids,
        "finish_reason": row.finish_reason or "interrupted",
        "seed": row.request.seed,
        "temperature": row.request.sampling.temperature,
        "num_prompt_tokens": len(row.prompt_ids),
    }
    if row.request.generation.logprobs is not None:
        found["logprobs"] = [token.logprob for token in row.tokens]
        found["top_logprobs"] = [token.top_logprobs for token in row.tokens]
    return found


def report(engine: "Engine", run: "Generation", args: argparse.Namespace) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    [row] = run.rows
    stats = run.stats
    return {
        "model": args.model,
        "method": args.method,
        "coupled": args.coupled,
        "draft": None if "draft" in UNUSED.get(args.method, ()) else engine.models.drafter_name,
        **where(engine.model),
        **answer(row),
        **vars(row.stats),
        **vars(stats),
        "ms_per_token": stats.ms_per_token,
        "tokens_per_second": stats.tokens_per_second,
        "stages": [vars(stage) for stage in stats.stages],
        "levels": [level.as_dict() for level in stats.levels],
    }
