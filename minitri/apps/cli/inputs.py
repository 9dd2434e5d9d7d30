"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import os
import stat
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import minitri
from minitri import InputError
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.stats import num_common
from minitri.devices.parallel.ranks import join
from minitri.text.prompt_ids import check_prompt

Text = TypeVar("Text")
DEMO_PROMPT_TOKENS = 4000  # without another flag: read in seconds on a laptop
MAX_PROMPT_BYTES = 16 << 20  # 4 million tokens of English; some files have no end


def find_prompt(args: Namespace) -> tuple[str, str]:
    """The prompt of the flags, or else what is piped in, or else, at a terminal, the demo; and a
    phrase that names the source. Raises `InputError`."""
    if args.prompt is not None:
        return read_prompt(None, args.prompt), ""
    file = args.prompt_file
    if file is None and not args.demo:
        if join().ask_first(is_piped):
            file = "-"
        elif not join().ask_first(sys.stdin.isatty):
            raise InputError("there is no text; give one in quotes, or --prompt-file, or --demo")
    if file is None:
        args.max_prompt_tokens = args.max_prompt_tokens or DEMO_PROMPT_TOKENS
    source = {"-": "standard input", None: "--demo"}.get(file, file)
    return read_prompt(file), f" of {shorten(source)}"


def is_piped() -> bool:
    """Whether standard input is a pipe or a file: no terminal, nor /dev/null."""
    return not stat.S_ISCHR(os.fstat(0).st_mode)


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """A prompt as it is, or the text of a file or of standard input (`-`), or the demo. Raises
    `InputError`."""
    if prompt is None:
        prompt = demo_text() if file is None else read_text(file, "--prompt-file")
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def read_text(file: str, flag: str) -> str:
    """The UTF-8 text of the file that a flag names, or of standard input (`-`), without a NUL.
    Raises `InputError`."""

    def decode(content: bytes) -> str:
        if b"\0" in content:
            raise ValueError("it has a NUL")
        return content.decode("utf-8-sig")

    return join().ask_first(lambda: read_file(file, flag, "a file of UTF-8 text", decode))


def read_file(file: str, flag: str, wanted: str, decode: Callable[[bytes], Text]) -> Text:
    """The content of the file that a flag names, or of standard input (`-`), after `decode`. Raises
    `InputError`, which says what is `wanted`."""
    name = "standard input" if file == "-" else f"{flag} {shorten(file)}"
    with explain(f"{name} cannot be read", f"give {wanted}"):
        with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream:
            content = stream.read(MAX_PROMPT_BYTES + 1) or b""  # None where nothing waits
        if len(content) > MAX_PROMPT_BYTES:
            raise ValueError(f"it has more than {MAX_PROMPT_BYTES >> 20} MB")
        if not content:
            raise ValueError("it is empty")
        return decode(content)


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(
    prompt: str,
    engine: "minitri.Engine | minitri.loader.OpenEngine",
    args: Namespace,
    num_new: int | None = None,
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
    num_new = num_new or args.max_new_tokens or 0
    room = engine.config.context_length - num_new
    ways = [f"keep its first {room} tokens with max_prompt_tokens={room}"] if room > 0 else []
    check_prompt(ids, engine.config, num_new, *ways)
    return ids
