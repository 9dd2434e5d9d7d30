"""From what a caller gives as prompts and seeds to token ids and one seed per row, checked."""

import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, shorten
from minitri.core.requests import Prompt

if TYPE_CHECKING:  # it imports libraries, which the help of programs does not need
    from minitri.text.tokenizer import Tokenizer

MAX_STRETCH = 32
"""Times its context to which RoPE is advised to stretch a model."""
MAX_SEED = 2**32 - 1
"""PyTorch's generator on the CPU looks at no more bits."""


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or several as a list of them. Raises `InputError`."""
    items = [prompts] if isinstance(prompts, str) else _as_list(prompts)
    if any(isinstance(it, str | Sequence) or getattr(it, "shape", ()) for it in items[:1]):
        return items
    return [items]  # of token ids


def encode_prompt(prompt: Prompt, tokenizer: "Tokenizer") -> list[int]:
    """Token ids of a prompt; a tensor or an array will do. Raises `InputError`."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt) if prompt else []
    return _as_list(prompt, as_int)


def _as_list(prompt: Any, convert: Callable[[Any], Any] = lambda it: it) -> list[Any]:
    """Of anything that has an order. Raises `InputError`."""
    try:
        if not isinstance(prompt, bytes | Mapping | Set):
            return [convert(item) for item in prompt]
    except TypeError:
        pass
    raise InputError(
        f"the prompt is {shorten(repr(prompt), 60)}; give a text, a list of token ids, or a list "
        "of those"
    )


def as_int(number: Any) -> int:
    """A whole number of any library, which true and false are not. Raises `TypeError`."""
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


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
    """Another one every time."""
    return secrets.randbelow(MAX_SEED + 1)


def next_seed(seed: int, number: int = 1) -> int:
    """The seed of another text, so many after the one with this seed."""
    return (seed + number) % (MAX_SEED + 1)


def fold_seed(seed: int) -> int:
    """The seed for a number of 64 bits, or a negative one: itself, if it is one."""
    seed %= 1 << 64
    return (seed ^ seed >> 32) & MAX_SEED


def as_seeds(seed: int | Sequence[int], num_rows: int) -> list[int]:
    """One seed per row. Raises `InputError` unless a generator can take them."""
    try:
        given = seed if isinstance(seed, Iterable) else range(as_int(seed), seed + num_rows)
        seeds = [as_int(one) for one in given]
    except TypeError:
        seeds = []
    if len(seeds) != num_rows or not all(0 <= s <= MAX_SEED for s in seeds):
        raise InputError(
            f"seed is {shorten(seed, 60)}; give a whole number from 0 to 2^32 - {num_rows}, or one "
            f"for each of {num_rows} prompts"
        )
    return seeds
