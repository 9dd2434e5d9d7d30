"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import argparse
import logging
import sys
from pathlib import Path

from minitri.cli.arguments import DEMO_PROMPT_TOKENS
from minitri.engine import Engine
from minitri.errors import InputError

log = logging.getLogger("minitri")


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The text of a prompt, of a UTF-8 file, of standard input (`-`), or else of the demo."""
    if prompt is not None:
        return prompt
    if file is None:
        return demo_text()
    source = "standard input" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise InputError(
            "there is no standard input to read the prompt from; give --prompt or a file"
        )
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"cannot read the prompt from {source}: {error.strerror}; check --prompt-file"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text (byte {error.start}); convert it, or give another file"
        ) from None


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


def encode_prompt(engine: Engine, text: str, max_tokens: int | None) -> list[int]:
    """Token ids of the prompt, the first `max_tokens` of them."""
    if not text:
        raise InputError("the prompt is empty; give at least one character")
    return engine.tokenizer.encode(text, max_tokens)
