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

MAX_PROMPT_BYTES = 16 << 20
"""Of a file: 4 million tokens of English. It bounds the memory for a file that has no end."""


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
        raise InputError("there is no standard input to read; give --prompt or a file")
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_PROMPT_BYTES + 1) or b""  # None where nothing waits
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        line = f"cannot read the prompt from {source}: {reason}; check --prompt-file"
        raise InputError(line) from None
    if len(content) > MAX_PROMPT_BYTES:
        size = f"more than {MAX_PROMPT_BYTES >> 20} MB"
        raise InputError(f"{source} has {size}, and no model reads as much; give a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start}); convert it, or give another file"
        raise InputError(f"{source} {problem}") from None
    if "\0" in text:
        problem = f"is not text: character {text.index(chr(0))} is NUL"
        raise InputError(f"{source} {problem}; give another file")
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
    text: str,
    tokenizer: Tokenizer,
    config: ModelConfig,
    max_tokens: int | None,
    num_new: int,
    args: argparse.Namespace | None = None,
) -> list[int]:
    """Token ids of a prompt, at most `max_tokens`, by --fit, --chat and --system.

    With --chat the text is a message, and what is cut is cut from it, not from the template. Raises
    `InputError` if the model has no template.
    """
    fit = getattr(args, "fit", None)
    tails: list[list[int]] = [[]]
    if getattr(args, "chat", False):
        ids, empty = (_in_template(content, tokenizer, args) for content in (text, ""))
        num_head = len(os.path.commonprefix([ids, empty]))  # noqa: RUF071 (of lists)
        tails = [ids[::-1], empty[num_head:][::-1]]
    else:
        ids = tokenizer.encode(text)
        num_head = int(ids[:1] == [tokenizer.bos_token_id])
    num_tail = len(os.path.commonprefix(tails))  # noqa: RUF071
    return cut(ids, config, max_tokens, num_new, fit, num_head=num_head, num_tail=num_tail)


def _in_template(message: str, tokenizer: Tokenizer, args: argparse.Namespace | None) -> list[int]:
    system = getattr(args, "system", None)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": message}])


def cut(
    ids: list[int],
    config: ModelConfig,
    max_tokens: int | None,
    num_new: int,
    fit: str | None,
    *,
    num_head: int = 0,
    num_tail: int = 0,
) -> list[int]:
    """The first tokens of a prompt, or the last ones, with those at both ends that stay.

    At most `max_tokens`; with `fit` so few that `num_new` more fit into the context.
    """
    room = max_tokens or len(ids)
    if fit is not None:
        room = max(1, min(room, config.context_length - num_new))
    middle = ids[num_head : len(ids) - num_tail]
    num = room - num_head - num_tail
    if len(middle) <= num or num < 1:
        return ids
    log.info("prompt: only its %s %d tokens, the others do not fit", fit or "first", room)
    kept = middle[-num:] if fit == "last" else middle[:num]
    return [*ids[:num_head], *kept, *ids[len(ids) - num_tail :]]
