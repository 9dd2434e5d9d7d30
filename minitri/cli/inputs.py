"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import argparse
import logging
import os.path
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from minitri import InputError, ModelConfig
from minitri.errors import shorten
from minitri.loading.prompt_ids import check_prompt
from minitri.loading.tokenizer import Tokenizer
from minitri.parallel.ranks import join

log = logging.getLogger("minitri")

MAX_PROMPT_BYTES = 16 << 20
"""Of a file: 4 million tokens of English. It bounds the memory for a file that has no end."""


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The text of a prompt, of a UTF-8 file, of standard input (`-`), or else of the demo."""
    if prompt is None:
        prompt = demo_text() if file is None else read_text(file)
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def read_text(file: str) -> str:
    """What a file or standard input (`-`) holds. Raises `InputError` unless that is text."""
    return join().ask_first(lambda: _read_text(file))


def _read_text(file: str) -> str:
    source = "standard input" if file == "-" else shorten(file)
    try:
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_PROMPT_BYTES + 1) or b""  # None where nothing waits
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {source}: {reason}; name another file") from None
    if len(content) > MAX_PROMPT_BYTES:
        size = f"more than {MAX_PROMPT_BYTES >> 20} MB"
        raise InputError(f"{source} has {size}, and no model reads as much; give a part of it")
    if "\0" in text:
        raise InputError(f"{source} is not UTF-8 text; convert it, or give another file")
    return text


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(
    prompt: str | list[int],
    tokenizer: Tokenizer,
    config: ModelConfig,
    num_new: int,
    args: argparse.Namespace,
) -> list[int]:
    """Token ids of a prompt by --max-prompt-tokens, --fit, --chat and --system.

    What is cut is cut from the text, not from BOS or the chat template around it. Raises
    `InputError` if there is no template, or no room for the prompt and `num_new` more tokens.
    """

    def encoded(text: str | list[int]) -> list[int]:
        if not isinstance(text, str):
            return text
        if not vars(args).get("chat"):
            return tokenizer.encode(text)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return tokenizer.encode_chat([*system, {"role": "user", "content": text}])

    ids = encoded(prompt)
    empty = encoded(prompt[:0])
    start = num_same(ids, empty)
    end = len(ids) - num_same(ids[::-1], empty[start:][::-1])
    fit = vars(args).get("fit")
    room = args.max_prompt_tokens or len(ids)
    if fit is not None:
        room = min(room, config.context_length - num_new)
    num_cut = len(ids) - room
    if 0 < num_cut < end - start:
        log.info("prompt: only its %s %d tokens, the others do not fit", fit or "first", room)
        first = start if fit == "last" else end - num_cut
        ids = ids[:first] + ids[first + num_cut :]
    check_prompt(ids, config, num_new)
    return ids


def num_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Tokens that two texts have in common, from the first on."""
    return len(os.path.commonprefix([[*tokens], [*others]]))  # noqa: RUF071 (of lists)
