"""The command line: `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the only line on
standard output is one JSON object. Exit codes: 0 done, 2 bad usage or bad input (one line), 130
interrupted; 1 is a bug.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minitri.errors import InputError
from minitri.cli.exits import clean_exits

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.engine import Engine, load
    from minitri.cli.arguments import (
        DEMO_PROMPT_TOKENS,
        build_parser,
        draft_of,
        ignored_flags,
        settings_of,
    )
    from minitri.generation import End, Generation, PrefillProgress, Token
    from minitri.cli.report import colored, legend, report, summary

log = logging.getLogger("minitri")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt text that the flags name."""
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is None:
        return demo_text()
    source = "standard input" if args.prompt_file == "-" else args.prompt_file
    try:
        if args.prompt_file == "-":
            if sys.stdin is None:
                raise InputError(
                    "there is no standard input to read the prompt from; give --prompt or a file"
                )
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(args.prompt_file).read_bytes().decode("utf-8-sig")
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


def encode_prompt(engine: Engine, text: str, max_tokens: int | None) -> list[int]:
    """Token ids of the prompt, the first `max_tokens` of them."""
    if not text:
        raise InputError("the prompt is empty; give at least one character")
    return engine.tokenizer.encode(text, max_tokens)


class PrefillBar:
    """A progress bar on standard error with the time that the rest will take; none where nobody watches."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def show(self, event: PrefillProgress) -> None:
        """Moves the bar; removes it when the prompt has been read."""
        if self._bar is None:
            layout = "prompt {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens, {elapsed} passed, {postfix[0]}"
            self._bar = tqdm(
                total=event.num_tokens,
                leave=False,
                bar_format=layout,
                postfix=[""],
                disable=True if self._quiet else None,
            )
        self._bar.postfix = [f"{event.eta_seconds:.0f} s to go"]
        self._bar.update(event.num_done - self._bar.n)
        if event.num_done == event.num_tokens:
            self.close()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def stream(run: Generation, *, as_json: bool, quiet: bool, color: bool) -> str:
    """Shows a run of one prompt as it goes; returns how it finished, `interrupted` after Ctrl-C."""
    bar = PrefillBar(quiet=quiet)
    try:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.show(event)
            elif isinstance(event, Token) and not as_json:
                print(
                    colored(event.text, event.origin) if color else event.text, end="", flush=True
                )
            elif isinstance(event, End):
                return event.finish_reason
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        bar.close()
        if not as_json:
            print(flush=True)
    raise AssertionError("a run ended without an End event")


def finish(run: Generation, *, quiet: bool) -> End:
    """Runs one prompt to its end behind a progress bar, shows nothing else."""
    bar = PrefillBar(quiet=quiet)
    try:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.show(event)
            elif isinstance(event, End):
                return event
    finally:
        bar.close()
        run.close()
    raise AssertionError("a run ended without an End event")


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    settings, draft = settings_of(args), draft_of(args)
    for flag in ignored_flags(args):
        log.warning("%s is ignored: --method %s has no use for it", flag, args.method)
    text = read_prompt(args)
    limit = args.max_prompt_tokens
    if args.prompt is None and args.prompt_file is None and limit is None:
        limit = DEMO_PROMPT_TOKENS
        log.info("prompt: the first %d tokens of --demo", limit)
    engine = load(
        args.model,
        draft=draft,
        dtype=args.dtype,
        device=args.device,
        attention=args.attention,
        rope_scaling=args.rope_scaling,
        progress=not args.quiet,
    )
    run = engine.generate(encode_prompt(engine, text, limit), **settings)
    if args.color and not args.quiet:
        print(legend(), file=sys.stderr)
    finish_reason = stream(run, as_json=args.json, quiet=args.quiet, color=args.color)
    if args.json:
        print(json.dumps(report(engine, run, args, finish_reason)), flush=True)
    if not args.quiet:
        print(summary(engine, run), file=sys.stderr)
    return 130 if finish_reason == "interrupted" else 0


def show_log(*, quiet: bool) -> None:
    """Sends the package's log to standard error, message only."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("minitri")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def run_program(
    parser: argparse.ArgumentParser,
    command: Callable[[argparse.Namespace], int],
    argv: list[str] | None,
) -> None:
    """Parses the flags, sets up the log and UTF-8 output, runs the command and exits with its code."""
    with clean_exits():
        args = parser.parse_args(argv)
        show_log(quiet=args.quiet)
        for output in (sys.stdout, sys.stderr):
            if hasattr(output, "reconfigure"):
                output.reconfigure(encoding="utf-8", errors="replace")
        sys.exit(command(args))


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    run_program(build_parser(), run_command, argv)


if __name__ == "__main__":
    main()
