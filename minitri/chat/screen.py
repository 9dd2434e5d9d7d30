"""The terminal of a chat: lines with editing and history, and answers that Ctrl-C stops."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from minitri.errors import InputError


class Lines:
    """What the user types: by `prompt_toolkit` at a terminal, else lines of standard input."""

    def __init__(self, commands: list[str]) -> None:
        """`commands` are completed by TAB. Raises `InputError` without `prompt_toolkit`."""
        self._ask: Callable[[], str] = read_line
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            try:
                from prompt_toolkit import PromptSession
                from prompt_toolkit.completion import WordCompleter
            except ModuleNotFoundError:
                raise InputError(
                    "a chat at a terminal needs prompt_toolkit; install it: pip install "
                    "'minitri[chat]'"
                ) from None
            completer = WordCompleter(commands, sentence=True)
            session: PromptSession[str] = PromptSession(
                "> ", completer=completer, complete_while_typing=False
            )
            self._ask = session.prompt

    def next(self) -> str | None:
        """The next line, without spaces around it; None at the end: Ctrl-D or Ctrl-C."""
        try:
            return self._ask().strip()
        except (EOFError, KeyboardInterrupt):
            return None


def read_line() -> str:
    """A line of standard input. Raises `EOFError` at its end, `InputError` if it is no text."""
    try:
        line = sys.stdin.readline() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8 text (byte {error.start}); convert it"
        ) from None
    if not line:
        raise EOFError
    return line


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Ctrl-C sets the event that this gives, and interrupts nothing; a second one does."""
    stopped = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
