"""What a run did, in words for people and in numbers for programs."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minitri import Token
from minitri.cli.arguments import UNUSED
from minitri.requests import Row

if TYPE_CHECKING:
    from minitri import Engine, Generation
    from minitri.model.llama import Llama

GUESSED = ("draft", "retrieval")
"""Origins of tokens that the target only verified."""


def where(model: "Llama") -> dict[str, str]:
    """What a model runs on: a part of every JSON line."""
    import torch  # is there, as the model is

    from minitri.loading.devices import attention_name

    names = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    return {**names, "attention": attention_name(model.attend), "torch": torch.__version__}


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
        counts = [row.stats.by_origin.get(name, 0) for row in run.rows for name in GUESSED]
        line += f", {sum(counts) / total:.0%} guessed"
    return line


def as_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, int]) -> str:
    """Lines with a heading; `columns` are names of values, and how many characters wide."""
    lines = []
    for row in [{name: name.removeprefix("num_") for name in columns}, *rows]:
        cells = {name: row.get(name, "") for name in columns}
        texts = {name: f"{it:.2g}" if type(it) is float else str(it) for name, it in cells.items()}
        lines.append("".join(texts[name].ljust(width) for name, width in columns.items()).rstrip())
    return "\n".join(lines)


def answer(row: Row, finish_reason: str, tokens: Sequence[Token]) -> dict[str, Any]:
    """A text as a part of JSON; with --logprobs each token's own, and the likeliest."""
    found: dict[str, Any] = {
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
    engine: "Engine",
    run: "Generation",
    args: argparse.Namespace,
    reason: str,
    tokens: Sequence[Token],
) -> dict[str, Any]:
    """The statistics for programs: the object that --json prints."""
    [row] = run.rows
    stats = run.stats
    return {
        "model": args.model,
        "method": args.method,
        "coupled": args.coupled,
        "draft": None if "draft" in UNUSED.get(args.method, ()) else engine.models.drafter_name,
        **where(engine.model),
        **answer(row, reason, tokens),
        **vars(row.stats),
        **vars(stats),
        "ms_per_token": stats.ms_per_token,
        "tokens_per_second": stats.tokens_per_second,
        "stages": [vars(stage) for stage in stats.stages],
        "levels": [level.as_dict() for level in stats.levels],
    }
