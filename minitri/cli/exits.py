"""How a program starts and how it ends: with an exit code and at most one line on standard error.

Imports nothing heavy, so that it can guard the imports that are.
"""

import errno
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from minitri.errors import InputError


@contextmanager
def program(parser: ArgumentParser, argv: list[str] | None) -> Iterator[Namespace]:
    """What every program does around its work: flags, log, UTF-8 output, and `clean_exits`."""
    with clean_exits():
        args = parser.parse_args(argv)
        log = logging.getLogger("minitri")
        log.handlers = [logging.StreamHandler()]  # to standard error, message only
        log.setLevel(logging.WARNING if args.quiet else logging.INFO)
        for output in (sys.stdout, sys.stderr):
            if hasattr(output, "reconfigure"):
                output.reconfigure(encoding="utf-8", errors="replace")
        yield args


@contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with a code and at most one line.

    That is for bad input, Ctrl-C, a full disk and a closed pipe; anything else is a bug.
    """
    try:
        yield
    except InputError as error:
        print(f"minitri: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("minitri: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # What could not be written is given up, so that Python does not fail again in the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read our output has gone
            sys.exit(0)
        advice = "free some, or send it elsewhere"
        print(f"minitri: no space left to write the output; {advice}", file=sys.stderr)
        sys.exit(2)
