"""Checks prompts and seeds of callers, and turns them into token ids and one seed per row."""

import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, shorten
from minitri.core.requests import Prompt
from minitri.text.tokenizer import Tokenizer

MAX_STRETCH = 32  # largest factor of RoPE scaling that an error message recommends
MAX_SEED = 2**32 - 1  # largest seed: PyTorch's generator on the CPU reads only 32 bits


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A list of the prompts given, one or several, not encoded yet. Raises `InputError`."""
    items = [prompts] if isinstance(prompts, str) else _as_list(prompts)
    if any(isinstance(item, str | Sequence) or getattr(item, "shape", ()) for item in items[:1]):
        return items
    return [items]  # the token ids of one prompt


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text, or of a list, a tensor or an array of ids. Raises `InputError`."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt) if prompt else []
    return _as_list(prompt, as_int)


def _as_list(prompt: Any, convert: Callable[[Any], Any] = lambda item: item) -> list[Any]:
    """The items of a list, tensor or the like, converted. Raises `InputError` for other prompts."""
    try:
        if not isinstance(prompt, bytes | Mapping | Set):
            return [convert(item) for item in prompt]
    except TypeError:
        pass
    raise InputError(f"the prompt is {shorten(repr(prompt), 60)}; give texts or lists of token ids")


def as_int(number: Any) -> int:
    """Converts an integer of any library to Python's. Raises `TypeError`, for booleans, too."""
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def check_prompt(ids: list[int], config: ModelConfig, num_new: int, *ways: str) -> None:
    """Raises `InputError` unless a prompt's ids are valid and leave room for `num_new` tokens. For
    a prompt that is too long the message advises `ways`, by default to shorten it."""
    if not ids:
        raise InputError("prompt is empty; give at least one character or token")
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise InputError(f"prompt has token id {token}; give ids 0 to {config.vocab_size - 1}")
    most = config.context_length
    room = most - num_new
    if len(ids) > room:
        problem = f"the prompt has {len(ids)} tokens but {config.name} holds {most}"
        if num_new:
            problem += f" minus max_new_tokens={num_new}"
        fewer = f"shorten it to {room} tokens" if room > 0 else "lower max_new_tokens="
        stretch = -(-(len(ids) + num_new) // (config.rope.original_context or most))
        longer = [f"stretch the context with rope_scaling=yarn:{stretch}"]
        raise InputError(problem, *ways or [fewer], *longer * (stretch <= MAX_STRETCH))


def draw_seed() -> int:
    """A new random seed."""
    return secrets.randbelow(MAX_SEED + 1)


def next_seed(seed: int, number: int = 1) -> int:
    """The seed of the text that comes `number` texts after the one with this seed."""
    return (seed + number) % (MAX_SEED + 1)


def as_seeds(seed: int | Sequence[int], num_rows: int) -> list[int]:
    """One seed per row: those given, or seed + b for row b. Raises `InputError` for wrong seeds."""
    try:
        given = seed if isinstance(seed, Iterable) else range(as_int(seed), seed + num_rows)
        seeds = [as_int(number) for number in given]
    except TypeError:
        seeds = []
    if len(seeds) != num_rows or not all(0 <= number <= MAX_SEED for number in seeds):
        wanted = f"a whole number from 0 to 2^32 - {num_rows}, or one for each of {num_rows}"
        raise InputError(f"seed is {shorten(seed, 60)}; give {wanted} prompts")
    return seeds
