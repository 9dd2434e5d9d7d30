"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from minitri import InputError, ModelConfig
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.stats import num_common
from minitri.devices.parallel.ranks import join
from minitri.text.prompt_ids import check_prompt
from minitri.text.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 16 << 20
"""Of a file: 4 million tokens of English. It bounds the memory for a file that has no end."""


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The text of a prompt, a UTF-8 file, standard input (`-`), or else the demo."""
    if prompt is None:
        prompt = demo_text() if file is None else read_text(file, "--prompt-file")
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def read_text(file: str, flag: str) -> str:
    """What the file of a flag or standard input (`-`) holds. Raises `InputError` unless that is
    text."""
    return join().ask_first(lambda: read_file(file, flag, "a file of UTF-8 text", _decode))


def read_file(file: str, flag: str, wanted: str, decode: Callable[[bytes], str]) -> str:
    """The text that `decode` finds in the file of a flag, or in standard input (`-`). Raises
    `InputError`, which says what is `wanted`."""
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


def _decode(content: bytes) -> str:
    if b"\0" in content:
        raise ValueError("it has a NUL")
    return content.decode("utf-8-sig")


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(
    prompt: str, tokenizer: Tokenizer, config: ModelConfig, num_new: int, args: argparse.Namespace
) -> list[int]:
    """Token ids of a prompt by the flags. The text alone is cut, not BOS or the chat template."""

    def encoded(text: str) -> list[int]:
        if not vars(args).get("chat"):
            return tokenizer.encode(text)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return tokenizer.encode_chat([*system, {"role": "user", "content": text}])

    ids = encoded(prompt)
    empty = encoded("")
    most = args.max_prompt_tokens or len(ids)
    if len(empty) < most < len(ids):
        log.debug("prompt: only its first %d tokens", most)
        rest = empty[num_common(ids, empty) :]
        end = len(ids) - num_common(ids[::-1], rest[::-1])
        ids = ids[: most + end - len(ids)] + ids[end:]
    room = config.context_length - num_new
    ways = [f"keep its first {room} tokens with max_prompt_tokens={room}"] if room > 0 else []
    check_prompt(ids, config, num_new, *ways)
    return ids
