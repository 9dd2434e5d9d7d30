"""How a program starts and ends: with an exit code and at most one line on standard error.

Imports next to nothing, so that Ctrl-C is answered with a line from the first milliseconds on."""

import atexit
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import minitri
from minitri.core.errors import InputError, shorten

TYPE_CHECKING = False  # `typing` itself takes milliseconds, in which nothing guards Ctrl-C yet
if TYPE_CHECKING:
    from argparse import Namespace

    from minitri.apps.cli.arguments import OneLineParser


def program(
    build_parser: "Callable[[], OneLineParser]",
    run_command: "Callable[[Namespace], int | None]",
    *,
    parallel: bool = False,
) -> Callable[..., None]:
    """Makes the `main` of a program, which parses its flags and ends with an exit code.
    `parallel`: whether torchrun may start it in several processes."""

    def main(argv: list[str] | None = None) -> None:
        with clean_exits():
            import logging
            from types import SimpleNamespace

            from minitri.core.log import log
            from minitri.devices.parallel.ranks import join

            os.getcwd()  # noqa: PTH109  # raises if the folder is gone, where PyTorch would abort
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # no Ctrl-C at exit
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(encoding="utf-8", errors="replace")
            parser = build_parser()
            ranks = join()
            if ranks.count > 1 and not parallel:
                raise InputError(f"{parser.prog} is one process; start it without torchrun")
            log.disabled = ranks.rank > 0  # the first process speaks for all
            if log.disabled:
                _mute()
            args = parser.parse_args(argv)
            args.in_flags = parser.in_flags  # for jsonl.py
            args.quiet |= log.disabled
            log.handlers = [logging.StreamHandler(SimpleNamespace(write=tell, flush=int))]
            level = "DEBUG" if args.verbose else "INFO"
            log.setLevel("WARNING" if args.quiet else level)
            try:
                parser.check(args)  # before anything is loaded
                sys.exit(run_command(args))
            except InputError as error:
                raise InputError(parser.in_flags(error)) from None

    return main


@contextmanager
def clean_exits() -> Iterator[None]:
    """Context that exits with a code and at most one line for errors that are no bugs:
    these are bad input, a missing package, Ctrl-C, and errors of the system such as a full disk."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # a shell has closed it
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: PTH123, SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except SystemExit as end:  # other ranks end with the first one's code
        raise _end(int(end.code)) if end.code else end from None
    except InputError as error:
        raise _end(2, " ".join(str(error).splitlines())) from None
    except ModuleNotFoundError as error:
        raise _end(2, f"{error}; pip install 'minitri[all]'") from None
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # a second one
        raise _end(130, "interrupted") from None
    except OSError as error:
        _mute()  # drops unwritten output; else Python fails again when it exits
        if isinstance(error, BrokenPipeError):  # whoever read our output has gone
            raise _end(0) from None
        raise _end(2, f"the system says: {shorten(error)}; free it, or write elsewhere") from None


@contextmanager
def on_ctrl_c(handler: Callable[..., object]) -> Iterator[None]:
    """Context in which Ctrl-C calls `handler`, a handler of signals."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(*_: object) -> None:
    """Signal handler of Ctrl-C: ends the process at once, with a line on standard error."""
    os.write(2, b"minitri: interrupted\n")
    os._exit(130)


def import_pytorch(*, huge_pages: bool = True) -> None:
    """Imports PyTorch and all that loads models, which takes seconds; a second call does nothing.
    `huge_pages`: large tensors are in pages of 2 MB, which Linux reads 5 % faster, but with which
    short texts of a server take much memory. THP_MEM_ALLOC_ENABLE, if set, decides instead."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", str(int(huge_pages)))
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # a later error says so
    gc.disable()  # modules stay: to look for cycles in them takes 0.15 s
    try:
        with on_ctrl_c(leave):  # extension modules may lose a KeyboardInterrupt
            minitri.load  # noqa: B018 (sets PyTorch's threads up, and imports it)
    finally:
        gc.freeze()
        # Python frees modules, which takes 0.3 s, only where Triton needs that.
        atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else None)
        gc.enable()


def _end(code: int, line: str = "") -> SystemExit:
    """Prints `line`, returns the exit to raise; of several ranks the first to end sets the code."""
    is_first = True
    if group := sys.modules.get("minitri.devices.parallel.group"):
        code, is_first = group.first_end(code)
    if line and is_first:
        tell(f"minitri: {line}\n")
    return SystemExit(code)


def tell(text: str) -> None:
    """Writes to standard error, at a terminal in lines that end at words."""
    if sys.stderr.isatty():
        from shutil import get_terminal_size
        from textwrap import TextWrapper

        width = get_terminal_size().columns
        lines = TextWrapper(width, break_on_hyphens=False, break_long_words=False)
        text = "\n".join(map(lines.fill, text.split("\n")))
    sys.stderr.write(text)


def _mute() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
