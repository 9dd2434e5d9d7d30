"""The prompt that the flags name: from the command line, a file, standard input or the demo."""

import os
import stat
import sys
from argparse import Namespace

import minitri
from minitri.apps.cli.documents import read_document
from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.core.stats import num_common
from minitri.devices.parallel.ranks import join
from minitri.text.prompt_ids import check_prompt

DEMO_PROMPT_TOKENS = 4000  # without another flag: read in seconds on a laptop


def find_prompt(args: Namespace) -> tuple[str, str, int | None]:
    """Returns the prompt's text by flags, from a pipe or the demo; " of FILE" or "", for a log
    line; and to how many tokens `encode` cuts it by default, or None. Raises `InputError`."""
    prompt = args.text if args.prompt is None else args.prompt  # TEXT is --prompt's short form
    if prompt is not None:
        return read_prompt(None, prompt), "", None
    file = args.prompt_file
    if file is None and not args.demo:
        if join().ask_first(is_piped):
            file = "-"
        elif not join().ask_first(sys.stdin.isatty):
            raise InputError("there is no text; give one in quotes, or --prompt-file, or --demo")
    source = {"-": "standard input", None: "--demo"}.get(file, file)
    return read_prompt(file), f" of {shorten(source)}", None if file else DEMO_PROMPT_TOKENS


def is_piped() -> bool:
    """Whether standard input is a pipe or a file: no terminal, nor /dev/null."""
    return not stat.S_ISCHR(os.fstat(0).st_mode)


def read_prompt(file: str | None, prompt: str | None = None) -> str:
    """The given `prompt`, or the text of a `file` (`-`: standard input), or else of the demo.
    Raises `InputError`."""
    if prompt is None:
        read = demo_text if file is None else lambda: read_document(file, "--prompt-file")
        prompt = join().ask_first(read)
    if not prompt:
        raise InputError("the prompt is empty; give at least one character")
    return prompt


def demo_text() -> str:
    """A long real text that every Python has: the topics of its help system."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(
    prompt: str,
    engine: "minitri.Engine | minitri.loader.OpenEngine",
    args: Namespace,
    num_new: int | None = None,
    usual_tokens: int | None = None,
) -> list[int]:
    """Token ids of a prompt that leave room for `num_new` or --max-new-tokens. Raises `InputError`.
    The text's end, not its chat template's, is cut at --max-prompt-tokens or `usual_tokens`."""

    def ids_of(text: str) -> list[int]:
        if not vars(args).get("chat"):
            return engine.tokenizer.encode(text)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return engine.tokenizer.encode_chat([*system, {"role": "user", "content": text}])

    ids = ids_of(prompt)
    empty = ids_of("")
    num_new = num_new or args.max_new_tokens or 0
    room = engine.config.context_length - num_new
    most = args.max_prompt_tokens or (min(usual_tokens, room) if usual_tokens else len(ids))
    if len(empty) < most < len(ids):
        log.info(f"prompt: only its first {most} of {len(ids)} tokens are read")
        after = empty[num_common(ids, empty) :]  # what a chat template adds after the text
        num_last = num_common(ids[::-1], after[::-1])
        ids = ids[: most - num_last] + ids[len(ids) - num_last :]
    ways = [f"keep its first {room} tokens with max_prompt_tokens={room}"] if room > 0 else []
    check_prompt(ids, engine.config, num_new, *ways)
    return ids
