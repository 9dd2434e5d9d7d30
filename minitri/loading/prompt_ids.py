"""From what a caller gives as prompts and seeds to token ids and one seed per row, checked."""

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.tokenizer import Tokenizer

Prompt = str | Sequence[int]
MAX_SEED = 2**32 - 1
"""PyTorch's generator on the CPU looks at no more bits."""


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of one prompt or several; tensors and arrays will do. Raises `InputError`."""
    try:
        items: list[Any] = [prompts] if isinstance(prompts, str) else _as_list(prompts)
        if not isinstance(items[0], str | Sequence) and not getattr(items[0], "shape", ()):
            items = [items]  # one list of token ids, or tensor or array of one dimension
        return [
            tokenizer.encode(prompt)
            if isinstance(prompt, str) and prompt
            else [operator.index(token) for token in _as_list(prompt)]
            for prompt in items
        ]
    except (TypeError, IndexError):
        raise InputError(
            f"the prompt is {shorten(repr(prompts), 60)}; give a text, a list of token ids, or a "
            "list of those"
        ) from None


def _as_list(prompt: Any) -> list[Any]:
    """Of anything that has an order. Raises `TypeError`."""
    if isinstance(prompt, bytes | Mapping | Set):
        raise TypeError
    return list(prompt)


def check_prompt(ids: list[int], config: ModelConfig, num_new: int, *ways: str) -> None:
    """Raises `InputError` unless a prompt is valid and leaves room for `num_new` tokens. `ways` out
    are those that the caller has for a prompt that is too long."""
    if not ids:
        raise InputError("the prompt is empty; give at least one character or token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"prompt has token id {token}; {config.name} has ids from 0 to "
                f"{config.vocab_size - 1}"
            )
    room = config.context_length - num_new
    if len(ids) > room:
        problem = (
            f"the prompt has {len(ids)} tokens but {config.name} holds {config.context_length}"
        )
        fewer = f"shorten it to {room} tokens" if room > 0 else "lower max_new_tokens="
        base = config.rope.original_context or config.context_length
        longer = f"stretch the context with rope_scaling=yarn:{-(-(len(ids) + num_new) // base)}"
        raise InputError(f"{problem} minus max_new_tokens={num_new}", *ways or [fewer], longer)


def draw_seed() -> int:
    """Another one every time."""
    return secrets.randbelow(MAX_SEED + 1)


def as_seeds(seed: int | Sequence[int], num_rows: int) -> list[int]:
    """One seed per row. Raises `InputError` unless a generator can take them."""
    try:
        given = seed if isinstance(seed, Iterable) else range(seed, seed + num_rows)
        seeds = [int(operator.index(one)) for one in given]
    except TypeError:
        seeds = []
    if len(seeds) != num_rows or not all(0 <= s <= MAX_SEED for s in seeds):
        raise InputError(
            f"seed is {shorten(seed, 60)}; give a whole number from 0 to 2^32 - {num_rows}, or one "
            f"for each of {num_rows} prompts"
        )
    return seeds
