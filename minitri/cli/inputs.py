"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import argparse
import logging
import os.path
import sys
from contextlib import nullcontext
from pathlib import Path

from minitri.cli.arguments import DEMO_PROMPT_TOKENS
from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.tokenizer import Tokenizer
from minitri.parallel.ranks import join

log = logging.getLogger("minitri")

MAX_PROMPT_BYTES = 64 << 20
"""Of a file: 16 million tokens of English. It bounds the memory for a file that has no end."""

MANY_CONTEXTS = 4
"""A prompt so many times too long is not tokenized to its end, which may take minutes."""


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The text of a prompt, of a UTF-8 file, of standard input (`-`), or else of the demo."""
    if prompt is None:
        prompt = demo_text() if file is None else join().ask_first(lambda: read_text(file))
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def read_text(file: str) -> str:
    """What a file or standard input (`-`) holds. Raises `InputError` unless that is text."""
    source = "standard input" if file == "-" else shorten(file)
    if file == "-" and sys.stdin is None:
        raise InputError(
            "there is no standard input to read the prompt from; give --prompt or a file"
        )
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_PROMPT_BYTES + 1) or b""  # None where nothing waits
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read the prompt from {source}: {reason}; check --prompt-file"
        ) from None
    if len(content) > MAX_PROMPT_BYTES:
        raise InputError(
            f"{source} has more than {MAX_PROMPT_BYTES >> 20} MB, and no model reads as much; "
            "give a part of it"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it, or give another file"
        ) from None
    if "\0" in text:
        raise InputError(
            f"{source} is not text: character {text.index(chr(0))} is NUL; give another file"
        )
    return text


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def max_tokens_of(args: argparse.Namespace) -> int | None:
    """How many tokens of the prompt are kept; None is all. The demo alone has a default."""
    limit: int | None = args.max_prompt_tokens
    if args.prompt is None and args.prompt_file is None and limit is None:
        limit = DEMO_PROMPT_TOKENS
        log.info("prompt: the first %d tokens of --demo", limit)
    return limit


def encode(
    text: str, tokenizer: Tokenizer, config: ModelConfig, max_tokens: int | None, num_new: int,
    fit: str | None = None,
) -> list[int]:  # fmt: skip
    """Token ids of a prompt, at most `max_tokens`, or what `fit` keeps of it.

    Raises `InputError` if it is far too long.
    """
    if fit is not None:
        room = room_for(config, max_tokens, num_new)
        ids = tokenizer.encode(text, room + 1) if fit == "first" else last(text, tokenizer, room)
        return cut(ids, room, fit, num_head=ids[:1] == [tokenizer.bos_token_id])
    limit = max_tokens or MANY_CONTEXTS * config.context_length + 1
    ids = tokenizer.encode(text, limit)
    if max_tokens is None and len(ids) == limit:
        raise InputError(
            f"prompt has {limit} tokens or more, {MANY_CONTEXTS} times what {config.name} "
            f"holds; keep {max(1, config.context_length - num_new)} (--max-prompt-tokens)"
        )
    return ids


def encode_chat(
    text: str, tokenizer: Tokenizer, config: ModelConfig, max_tokens: int | None, num_new: int,
    args: argparse.Namespace,
) -> list[int]:  # fmt: skip
    """Token ids of a conversation that begins with this message, in the model's template.

    What is cut is cut from the message. Raises `InputError` if the model has no template.
    """
    system = [{"role": "system", "content": args.system}] if args.system is not None else []

    def ids_of(content: str) -> list[int]:
        return tokenizer.encode_chat([*system, {"role": "user", "content": content}])

    ids, fit = ids_of(text), args.fit or ("first" if max_tokens else None)
    if fit is None:
        return ids
    empty = ids_of("")
    num_head = len(os.path.commonprefix([ids, empty]))  # noqa: RUF071 (of lists)
    num_tail = len(os.path.commonprefix([ids[::-1], empty[num_head:][::-1]]))  # noqa: RUF071
    room = room_for(config, max_tokens, num_new)
    return cut(ids, room, fit, num_head=num_head, num_tail=num_tail)


def room_for(config: ModelConfig, max_tokens: int | None, num_new: int) -> int:
    """Tokens that --fit may keep of a prompt."""
    return max(1, min(max_tokens or config.context_length, config.context_length - num_new))


def last(text: str, tokenizer: Tokenizer, room: int) -> list[int]:
    """Token ids of the end of a text: more than `room`, unless the whole has no more."""
    size = 8 * room
    while len(ids := tokenizer.encode(text[-size:])) <= room + 1 and size < len(text):
        size *= 2
    return ids


def cut(ids: list[int], room: int, fit: str, *, num_head: int = 0, num_tail: int = 0) -> list[int]:
    """At most `room` tokens, the first or the last ones, beside those at both ends that stay."""
    middle, num = ids[num_head : len(ids) - num_tail], room - num_head - num_tail
    if len(middle) <= num or num < 1:
        return ids
    log.info("prompt: only its %s %d tokens, the others do not fit", fit, room)
    kept = middle[:num] if fit == "first" else middle[-num:]
    return [*ids[:num_head], *kept, *ids[len(ids) - num_tail :]]
