"""The chat at a terminal: a line editor of prompt_toolkit.

Imported at a terminal alone, as the library takes a moment.
"""

import atexit
import functools
import termios
import tty
from collections.abc import Callable
from pathlib import Path

from prompt_toolkit import completion, filters, history, key_binding, shortcuts
from prompt_toolkit.contrib import regular_languages
from prompt_toolkit.contrib.regular_languages.completion import GrammarCompleter

COMMAND_LINE = r"(?P<command>/\w*)|/(documents|load|save)\s+(?P<file>.+)"


def ask(
    folder: Path, commands: list[str], obey: Callable[[str], str], status: Callable[[], str]
) -> None:
    """Asks for lines until Ctrl-D. Enter ends a question, but a line after a backslash, within
    triple quotes and with Alt. `obey` returns what is to be edited once more."""

    @functools.lru_cache(1)  # as every row of the window asks
    def is_open(text: str) -> bool:
        return text.count('"""') % 2 == 1

    keys = key_binding.KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    @keys.add("enter", filter=filters.Condition(lambda: session.default_buffer.text.endswith("\\")))
    def break_line(event: key_binding.KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor()
        event.current_buffer.insert_text("\n")

    completers = {
        "command": completion.WordCompleter(commands, sentence=True),
        "file": completion.PathCompleter(expanduser=True),
    }
    session = shortcuts.PromptSession[str](
        "> ",
        multiline=filters.Condition(lambda: is_open(session.default_buffer.text)),
        history=history.FileHistory(folder / "history") if folder.is_dir() else None,
        completer=GrammarCompleter(regular_languages.compile(COMMAND_LINE), completers),
        complete_style=shortcuts.CompleteStyle.READLINE_LIKE,
        key_bindings=keys,
        bottom_toolbar=status,
    )
    failed = ""
    while True:
        try:
            failed = obey(session.prompt(default=failed))
        except KeyboardInterrupt:
            failed = ""
        except EOFError:
            return


def let_keys_wait() -> None:
    """From now on keys that are typed during an answer wait, unseen, for the next question."""
    atexit.register(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0))
    tty.setcbreak(0, termios.TCSANOW)
