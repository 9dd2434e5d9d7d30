"""From what a caller gives as prompts and seeds to token ids and one seed per row, checked."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from minitri.config import LONGEST_CONTEXT, ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.tokenizer import Tokenizer

Prompt = str | Sequence[int]
MAX_SEED = 2**32 - 1
"""PyTorch's generator on the CPU looks at no more bits."""


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of one prompt or several. Raises `InputError` if there is none."""
    ids = [_encode(prompt, tokenizer) for prompt in _as_batch(prompts)]
    if not ids:
        raise InputError("there is no prompt; give at least one text or one list of token ids")
    return ids


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a tensor or array of one dimension is one prompt."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    is_list = hasattr(prompts, "__getitem__") and not isinstance(prompts, Mapping)
    if not is_list or getattr(prompts, "shape", (1,)) == ():  # a tensor of no dimension
        raise InputError(
            f"the prompt is {shorten(repr(prompts), 60)}; give a text, a list of token ids, or a "
            "list of those"
        )
    items: list[Any] = list(prompts)
    if items and not isinstance(items[0], str | Sequence) and not getattr(items[0], "shape", ()):
        return [items]
    return items


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt) if prompt else []
    if not isinstance(prompt, bytes):
        with suppress(TypeError):
            return [operator.index(token) for token in prompt]
    raise InputError(
        f"a prompt is {type(prompt).__name__} {shorten(repr(prompt), 60)}; give a text or a list "
        "of token ids"
    )


def check_prompt(ids: list[int], config: ModelConfig, num_new: int) -> None:
    """Raises `InputError` unless a prompt is valid and leaves room for `num_new` tokens."""
    if not ids:
        raise InputError("the prompt is empty; give at least one character or token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"prompt has token id {token}; {config.name} has ids from 0 to "
                f"{config.vocab_size - 1}"
            )
    if len(ids) + num_new > config.context_length:
        raise InputError(_too_long(len(ids), config, num_new))


def _too_long(num_tokens: int, config: ModelConfig, num_new: int) -> str:
    """The error for a prompt beyond the context, with numbers that work."""
    context = config.context_length
    rope = config.rope
    advice = []
    if num_new < context:
        advice.append(f"keep at most {context - num_new} (--max-prompt-tokens)")
    if num_tokens < context:
        advice.append(f"lower --max-new-tokens to {context - num_tokens}")
    trained = rope.original_context or context
    factor = -(-(num_tokens + num_new) // trained)
    fits = factor <= 1024 and factor * trained <= LONGEST_CONTEXT
    if fits and rope.frequency_divisors is None:
        kind = "yarn" if rope.kind == "default" else rope.kind
        advice.append(f"stretch the context (--rope-scaling {kind}:{factor})")
    return (
        f"prompt has {num_tokens} tokens but {config.name} holds {context} minus "
        f"max_new_tokens={num_new}; {', or '.join(advice) or f'lower both to {context} in all'}"
    )


def as_seeds(seed: int | Sequence[int], num_rows: int) -> list[int]:
    """One seed per row. Raises `InputError` unless a generator can take them."""
    try:
        seeds = [operator.index(s) for s in seed] if isinstance(seed, Iterable) else []
        seeds = seeds or [operator.index(seed) + b for b in range(num_rows)]  # type: ignore[arg-type]
    except TypeError:
        seeds = []
    if len(seeds) != num_rows or not all(0 <= s <= MAX_SEED for s in seeds):
        raise InputError(
            f"seed is {shorten(seed, 60)}; give a whole number from 0 to 2^32 - {num_rows}, or one "
            f"for each of {num_rows} prompts"
        )
    return seeds
