"""How a program starts and how it ends: with an exit code and at most one line on standard error.

    main = program(build_parser, run_command)

Imports next to nothing, so that it can guard the imports that take seconds.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator

from minitri.core.errors import InputError

TYPE_CHECKING = False  # `typing` itself takes milliseconds, in which nothing guards Ctrl-C yet
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from minitri.apps.cli.arguments import OneLineParser


@contextlib.contextmanager
def clean_imports(*, huge_pages: bool = True) -> Iterator[None]:
    """`clean_exits` for the seconds that importing PyTorch takes, where extension modules lose
    exceptions, so that Ctrl-C ends the program at once."""
    before = signal.signal(signal.SIGINT, _stop_at_once)
    gc.disable()  # what is imported stays: to look for cycles in it takes 0.15 s of the start
    import warnings

    from minitri.devices.cpu.build import has_kernels

    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # an error follows
    # PyTorch's large tensors in pages of 2 MB: weights and KV caches are read 5 % faster on Linux.
    # A server has many rows, of which short texts then fill memory for long ones.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", str(int(huge_pages)))
    # Waiting threads of PyTorch would spin on the cores of compiled kernels: with them asleep
    # prompts are read 15 % faster. Without those kernels spinning is faster.
    if os.environ.get("MINITRI_KERNELS") != "off" and has_kernels():
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        with clean_exits():
            os.getcwd()  # noqa: PTH109 (imports more); a library of PyTorch aborts without it
            yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules look for what was never freed
        gc.enable()
        signal.signal(signal.SIGINT, before)


def program(
    build_parser: "Callable[[], OneLineParser]",
    run_command: "Callable[[Namespace], int | None]",
    parallel: bool = False,
) -> "Callable[..., None]":
    """The `main` of a program. `parallel`: torchrun may start it in several processes."""

    def main(argv: list[str] | None = None) -> None:
        with clean_exits():
            import logging

            from minitri.core.log import log
            from minitri.devices.parallel.ranks import join

            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # all is done by then
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(encoding="utf-8", errors="replace")
            parser = build_parser()
            ranks = join()
            if ranks.count > 1 and not parallel:
                raise InputError(f"{parser.prog} is one process; start it without torchrun")
            log.disabled = ranks.rank > 0  # the first speaks for all
            if log.disabled:
                _mute()
            args = parser.parse_args(argv)
            args.in_flags = parser.in_flags
            args.quiet |= log.disabled
            log.handlers = [logging.StreamHandler()]  # to standard error, message only
            level = "DEBUG" if args.verbose else "INFO"
            log.setLevel("WARNING" if args.quiet else level)
            try:
                sys.exit(run_command(args) or 0)
            except InputError as error:
                raise InputError(parser.in_flags(error)) from None

    return main


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with a code and at most one line: for bad input, a missing package, Ctrl-C,
    and what the system refuses, such as a write to a full disk. Anything else is a bug."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell has closed it
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: PTH123, SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except SystemExit as end:  # others that run with this process end with its code
        raise _end(int(end.code)) if end.code else end from None
    except InputError as error:
        raise _end(2, " ".join(str(error).splitlines())) from None
    except ModuleNotFoundError as error:
        raise _end(2, f"{error}; install it: pip install 'minitri[all]'") from None
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # a second one
        raise _end(130, "interrupted") from None
    except OSError as error:
        _mute()  # what could not be written is given up: else Python fails again in the end
        if isinstance(error, BrokenPipeError):  # whoever read our output has gone
            raise _end(0) from None
        raise _end(2, f"the system says: {error}; send output elsewhere, or free it") from None


def _end(code: int, line: str = "") -> SystemExit:
    """Says why, and with which code to end: of several processes that of the first to end."""
    is_first = True
    if (group := sys.modules.get("minitri.devices.parallel.group")) is not None:
        code, is_first = group.first_end(code)
    if line and is_first:
        print(f"minitri: {line}", file=sys.stderr)
    return SystemExit(code)


def _mute() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _stop_at_once(*_: object) -> None:
    os.write(2, b"minitri: interrupted\n")
    os._exit(130)
