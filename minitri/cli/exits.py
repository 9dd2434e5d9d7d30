"""How a program starts and how it ends: with an exit code and at most one line on standard error.

Imports next to nothing, so that it can guard the imports that take seconds.
"""

import atexit
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator

from minitri.errors import InputError

TYPE_CHECKING = False  # `typing` itself takes milliseconds, in which nothing guards Ctrl-C yet
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import TextIO

WRITE_ERRORS = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPIPE)
"""What may happen to a write although there is no bug."""


@contextlib.contextmanager
def clean_imports() -> Iterator[None]:
    """Ends the program at once and with one line if Ctrl-C comes, or if a package is missing.

    For the seconds that importing PyTorch takes. Extension modules lose exceptions there.
    """
    _open_closed_files()
    is_ours = False
    with contextlib.suppress(ValueError):  # in a thread other than the main one
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:
            signal.signal(signal.SIGINT, _stop_at_once)
    try:
        yield
    except ModuleNotFoundError as error:
        say(f"minitri: {error}; install it: pip install -e . in the folder of minitri\n")
        sys.exit(2)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop_at_once(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"minitri: interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def program(
    build_parser: "Callable[[], ArgumentParser] | ArgumentParser", argv: list[str] | None
) -> "Iterator[Namespace]":
    """What every program does around its work: flags, log, UTF-8 output, and `clean_exits`."""
    with clean_exits():
        import logging

        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # all is done by then
        for output in (sys.stdout, sys.stderr):
            if hasattr(output, "reconfigure"):
                output.reconfigure(encoding="utf-8", errors="replace")
        parser = build_parser() if callable(build_parser) else build_parser
        args = parser.parse_args(argv)
        log = logging.getLogger("minitri")
        log.handlers = [logging.StreamHandler()]  # to standard error, message only
        log.setLevel(logging.WARNING if args.quiet else logging.INFO)
        yield args


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with a code and at most one line.

    That is for bad input, Ctrl-C, a full disk and a closed pipe; anything else is a bug.
    """
    _open_closed_files()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; send it somewhere, such as > /dev/null")
        try:
            yield
        finally:
            sys.stdout.flush()
    except InputError as error:
        say("minitri: " + " ".join(str(error).splitlines()) + "\n")
        sys.exit(2)
    except KeyboardInterrupt:
        say("minitri: interrupted\n")
        sys.exit(130)
    except OSError as error:
        if error.errno not in WRITE_ERRORS:
            raise
        _give_up(sys.stdout)
        if error.errno == errno.EPIPE:  # whoever read our output has gone
            sys.exit(0)
        say(f"minitri: cannot write the output: {error.strerror}; send it elsewhere\n")
        sys.exit(2)
    finally:
        say("")


def say(text: str) -> None:
    """Writes to standard error, as far as that can be written to, and flushes it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _give_up(sys.stderr)


def _give_up(output: "TextIO") -> None:
    """Drops what could not be written, so that Python does not fail again in the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def _open_closed_files() -> None:
    """Keeps other files from becoming standard output or error, if a shell has closed those."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
