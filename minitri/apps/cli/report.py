"""Results of a run: a line and tables for people, objects of JSON for programs."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import minitri
from minitri.apps.cli.arguments import unused_by
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.core.requests import RequestState

if TYPE_CHECKING:
    from minitri.core.model.llama import Llama

Json = dict[str, Any]  # an object of JSON
_NO_TEXT = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, *range(0xD800, 0xE000))}


def json_line(content: Json) -> str:
    """An object as JSON in one line, with escapes for characters that some readers refuse."""
    return json.dumps(content, ensure_ascii=False).translate(_NO_TEXT)


def where(model: "Llama") -> dict[str, str]:
    """Where a model runs: dtype, device, attention backend and PyTorch version."""
    import torch  # imported already, by the model

    from minitri.devices.cpu.kernels import Kernels

    kernels = getattr(model.attend, "__self__", None)  # None for a plain function
    compiled = f"compiled ({kernels.instructions})" if isinstance(kernels, Kernels) else "cpu"
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": getattr(model.attend, "name", compiled),
        "torch": torch.__version__,
    }


def progress_bar(args: Namespace, **settings: Any) -> Any:
    """A tqdm bar with these `settings`; where no terminal shows it, a log line every 10 seconds."""
    from tqdm import tqdm  # with 20 ms of imports, which --help does not need

    if not sys.stderr.isatty():
        file = SimpleNamespace(write=lambda s: [*map(log.info, s.strip().splitlines())], flush=int)
        line = "{desc} {n_fmt} of {total_fmt}{unit}, {remaining} to go"
        settings |= {"file": file, "bar_format": line, "delay": 10, "mininterval": 10}
    return tqdm(disable=args.quiet, **settings)


def how_sampled(sampling: minitri.SamplingParams, seed: int) -> str:
    """Sampling settings that are not neutral, in words, with the seed where it counts."""
    greedy = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)  # which change no greedy text
    fields = vars(sampling if sampling.temperature else greedy)
    neutral = vars(minitri.SamplingParams())
    words = [f"{key} {shorten(fields[key], 80)}" for key in fields if fields[key] != neutral[key]]
    return ", ".join([*words, f"seed {seed}"] if sampling.temperature else ["greedy", *words])


def outline(run: "minitri.Generation") -> str:
    """Statistics of a run in a line for people."""
    stats = run.stats
    total = stats.num_generated_tokens
    seconds = stats.prefill_seconds + stats.decode_seconds
    line = f"{tokens(total)} in {seconds:.2f} s, {stats.prefill_seconds:.2f} s of it "
    line += f"for {tokens(stats.num_prefilled_tokens)} of the prompt and warm-up"
    if stats.tokens_per_second is not None:
        line += f", decoded at {stats.tokens_per_second:.1f} tokens/s"
    if total and stats.levels:
        stages = ("draft", "retrieval")
        num_guessed = sum(state.stats.by_origin[name] for state in run.rows for name in stages)
        line += f"; {num_guessed / total:.0%} of them were proposed ahead and confirmed"
    return line


def tokens(number: int) -> str:
    """A number of tokens in words: `1 token`, `2 tokens`."""
    return f"{number} token{'s' * (number != 1)}"


def as_table(columns: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A text table with a heading; of the `columns`, separated by spaces, those that a row has."""
    names = [name for name in columns.split() if any(name in row for row in rows)]
    lines = []
    for row in [{name: name.removeprefix("num_").replace("_", " ") for name in names}, *rows]:
        cells = (row.get(name, "") for name in names)
        texts = (f"{cell:<14.4g}" if isinstance(cell, float) else f"{cell!s:14}" for cell in cells)
        lines.append("".join(texts).rstrip())
    return "\n".join(lines)


def answer(state: RequestState) -> Json:
    """A request's output as an object of JSON, with the log-probabilities of --logprobs."""
    fields: Json = {
        "text": state.text,
        "token_ids": state.token_ids,
        "finish_reason": state.finish_reason or "interrupted",
        "seed": state.request.seed,
        "temperature": state.request.sampling.temperature,
        **vars(state.stats),
    }
    if state.request.generation.logprobs is not None:
        fields |= {
            "logprobs": [token.logprob for token in state.tokens],
            "top_logprobs": [token.top_logprobs for token in state.tokens],
        }
    return fields


def report(engine: "minitri.Engine", run: "minitri.Generation", args: Namespace) -> Json:
    """The object that --json prints for a run of one prompt: the text and all statistics."""
    [state] = run.rows
    stats = run.stats
    return {
        "model": args.model,
        "method": args.method,
        "coupled": args.coupled,
        "draft": None if "--draft" in unused_by(args) else engine.models.drafter_name,
        **where(engine.model),
        **answer(state),
        **vars(stats),
        "ms_per_token": stats.ms_per_token,
        "tokens_per_second": stats.tokens_per_second,
        "levels": [level.as_dict() for level in stats.levels],
    }
