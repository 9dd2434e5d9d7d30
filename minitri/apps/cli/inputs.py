"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import argparse
import os
import stat
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from minitri import InputError
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.stats import num_common
from minitri.devices.parallel.ranks import join
from minitri.text.prompt_ids import check_prompt

if TYPE_CHECKING:
    from minitri import Engine
    from minitri.loader import OpenEngine

DEMO_PROMPT_TOKENS = 4000
"""Length of the demo where no flag gives another: read in seconds on a laptop."""
MAX_PROMPT_BYTES = 16 << 20
"""Of a file: 4 million tokens of English. Bounds the memory for a file that has no end."""


def find_prompt(args: argparse.Namespace) -> tuple[str, str]:
    """The prompt of the flags, or without one what is piped in, or at a terminal the demo; and a
    phrase that names the source. Raises `InputError`."""
    if args.prompt is None and args.prompt_file is None:
        if not args.demo and join().ask_first(is_piped):
            args.prompt_file = "-"
        elif args.demo or join().ask_first(sys.stdin.isatty):
            args.max_prompt_tokens = args.max_prompt_tokens or DEMO_PROMPT_TOKENS
        else:
            raise InputError(
                "there is no text: standard input is neither a pipe nor a terminal; give one in "
                "quotes, a file with --prompt-file, or --demo"
            )
    file = args.prompt_file
    source = {"-": "standard input", None: "--demo"}.get(file, file)
    phrase = f" of {shorten(source)}" if args.prompt is None else ""
    return read_prompt(file, args.prompt), phrase


def is_piped() -> bool:
    """Whether standard input is a pipe or a file: no terminal, nor /dev/null."""
    return not stat.S_ISCHR(os.fstat(0).st_mode)


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The text of a prompt, a UTF-8 file, standard input (`-`), or else the demo. Raises
    `InputError`."""
    if prompt is None:
        prompt = demo_text() if file is None else read_text(file, "--prompt-file")
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def read_text(file: str, flag: str) -> str:
    """The UTF-8 text in the file that a flag names, or in standard input (`-`). Raises
    `InputError`."""

    def decode(content: bytes) -> str:
        if b"\0" in content:
            raise ValueError("it has a NUL")
        return content.decode("utf-8-sig")

    return join().ask_first(lambda: read_file(file, flag, "a file of UTF-8 text", decode))


def read_file(file: str, flag: str, wanted: str, decode: Callable[[bytes], str]) -> str:
    """The text that `decode` makes of the file that a flag names, or of standard input (`-`).
    Raises `InputError`, which says what is `wanted`."""
    name = "standard input" if file == "-" else f"{flag} {shorten(file)}"
    with explain(f"{name} cannot be read", f"give {wanted}"):
        if Path(file).is_dir():
            raise InputError(f"{name} is a folder; give {wanted}")
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_PROMPT_BYTES + 1) or b""  # None where nothing waits
        if len(content) > MAX_PROMPT_BYTES:
            raise ValueError(f"it has more than {MAX_PROMPT_BYTES >> 20} MB")
        if not content:
            raise InputError(f"{name} is empty; give at least one character")
        return decode(content)


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(
    prompt: str, engine: "Engine | OpenEngine", args: argparse.Namespace, num_new: int | None = None
) -> list[int]:
    """Token ids of a prompt by the flags, with room for `num_new` or --max-new-tokens. Only the
    text is cut to --max-prompt-tokens, not BOS or the chat template. Raises `InputError`."""

    def ids_of(text: str) -> list[int]:
        if not vars(args).get("chat"):
            return engine.tokenizer.encode(text)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return engine.tokenizer.encode_chat([*system, {"role": "user", "content": text}])

    ids = ids_of(prompt)
    empty = ids_of("")
    most = args.max_prompt_tokens or len(ids)
    if len(empty) < most < len(ids):
        log.debug("prompt: only its first %d tokens", most)
        rest = empty[num_common(ids, empty) :]
        end = len(ids) - num_common(ids[::-1], rest[::-1])
        ids = ids[: most + end - len(ids)] + ids[end:]
    num_new = args.max_new_tokens if num_new is None else num_new
    room = engine.config.context_length - num_new
    ways = [f"keep its first {room} tokens with max_prompt_tokens={room}"] if room > 0 else []
    check_prompt(ids, engine.config, num_new, *ways)
    return ids
