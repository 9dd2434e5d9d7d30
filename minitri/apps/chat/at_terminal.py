"""The chat at a terminal: a line editor of prompt_toolkit, and answers drawn by rich as Markdown.

Imported at a terminal alone, as the libraries take a moment."""

import atexit
import contextlib
import functools
import os
import signal
import termios
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from prompt_toolkit import completion, filters, history, key_binding, shortcuts
from prompt_toolkit.contrib import regular_languages
from prompt_toolkit.contrib.regular_languages.completion import GrammarCompleter
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

COMMAND_LINE = r"(?P<command>/\w*)|/(documents|load|save)\s+(?P<file>.+)"


def ask(
    folder: Path, commands: list[str], obey: Callable[[str], str], status: Callable[[], str]
) -> None:
    """Passes each input at a terminal to `obey`, which returns text to edit again, until Ctrl-D.
    Enter ends an input, but breaks the line after a backslash, with Alt, or in triple quotes.
    `folder` has the history of inputs; `commands` are completed; `status` makes the bottom line."""
    keys = key_binding.KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    @keys.add("enter", filter=filters.Condition(lambda: session.default_buffer.text.endswith("\\")))
    def break_line(event: key_binding.KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor()
        event.current_buffer.insert_text("\n")

    # Called for each line on the screen, of which a paste may have 50,000.
    is_open = functools.lru_cache(1)(lambda text: text.count('"""') % 2 == 1)
    words = completion.WordCompleter(commands, sentence=True)
    completers = {"command": words, "file": completion.PathCompleter(expanduser=True)}
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
            typed = session.prompt(default=failed)
            session.output.enable_bracketed_paste()  # during the answer, too, a paste stays whole
            session.output.flush()
            failed = obey(typed)
        except KeyboardInterrupt:
            session.default_buffer.append_to_history()  # Up brings it back
            failed = ""
        except EOFError:
            return
        finally:
            session.output.disable_bracketed_paste()
            session.output.flush()


def let_keys_wait() -> None:
    """Keeps keys typed during an answer, unseen, for the next question; SIGHUP calls `hang_up`."""
    atexit.register(termios.tcsetattr, 0, termios.TCSANOW, termios.tcgetattr(0))
    tty.setcbreak(0, termios.TCSANOW)
    signal.signal(signal.SIGHUP, hang_up)


def hang_up(*_: object) -> None:
    """Signal handler for a closed terminal: ends an answer as Ctrl-C does, printing nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    signal.raise_signal(signal.SIGINT)


class MarkdownFile(Live):
    """File whose text is drawn at a terminal: blocks as Markdown when complete, the rest plain."""

    _text = ""

    def write(self, text: str) -> None:
        """Adds text to a chat answer; draws the Markdown blocks that are complete."""
        self.start()
        text = self._text + text
        block, _, self._text = text.rpartition("\n\n")
        if block.count("```") % 2:  # code, which has blank lines
            block, self._text = "", text
        end = Text(self._text[-self.console.width * self.console.height // 3 :])
        self.update(end, refresh=bool(block))
        self._draw(block)

    def flush(self) -> None:
        """Does nothing, as text is drawn in whole blocks."""

    def close(self) -> None:
        """Draws the rest of the text that `write` was given."""
        self.stop()
        self._draw(self._text)

    def _draw(self, text: str) -> None:
        """Draws Markdown with its line breaks, and HTML in it, which rich would omit, as text."""
        if text.strip():
            block = Markdown("", hyperlinks=False)
            block.parsed = MarkdownIt("js-default").parse(text.replace("\n", "  \n"))
            for line in self.console.render_lines(block):
                drawn = Text()
                for part, style, _ in line:
                    drawn.append(part, style)
                drawn.rstrip()  # so that what is copied has no spaces at line ends
                self.console.print(drawn)
            self.console.print()


def answer_file() -> Any:
    """Context manager; gives a `MarkdownFile` for an answer, or None if stdout has no colors."""
    console = Console()
    if console.no_color or console.is_dumb_terminal:
        return contextlib.nullcontext()
    return contextlib.closing(MarkdownFile(console=console, transient=True, refresh_per_second=12))
