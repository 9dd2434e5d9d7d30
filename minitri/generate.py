"""The command line: `python -m minitri.generate`.

Text goes to standard output as it is generated, everything else to standard error. With --json the
only line on standard output is one JSON object. Exit codes: 0 done, 2 bad usage or bad input (one
line), 130 interrupted; 1 is a bug.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

from minitri.cli.exits import clean_exits, program

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.cli.arguments import build_parser, draft_of, ignored_flags, model_of, settings_of
    from minitri.cli.prompts import encode_prompt, max_tokens_of, read_prompt
    from minitri.cli.report import report, summary
    from minitri.cli.terminal import legend, stream
    from minitri.engine import load

log = logging.getLogger("minitri")


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    settings, draft = settings_of(args), draft_of(args)
    for flag in ignored_flags(args):
        log.warning("%s is ignored: --method %s has no use for it", flag, args.method)
    text, max_tokens = read_prompt(args.prompt_file, args.prompt), max_tokens_of(args)
    engine = load(**model_of(args), draft=draft)
    run = engine.generate(encode_prompt(engine, text, max_tokens), **settings)
    if args.color and not args.quiet:
        print(legend(), file=sys.stderr)
    finish_reason = stream(run, as_json=args.json, quiet=args.quiet, color=args.color)
    if args.json:
        print(json.dumps(report(engine, run, args, finish_reason)), flush=True)
    if not args.quiet:
        print(summary(engine, run), file=sys.stderr)
    return 130 if finish_reason == "interrupted" else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.generate`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
