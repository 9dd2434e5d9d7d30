"""Shows a run as it goes: text, a progress bar, colors by origin."""

import argparse
import re
import signal
import sys
from typing import TYPE_CHECKING

from minitri import PrefillProgress, Token

if TYPE_CHECKING:
    from minitri import Generation

COLORS = {
    "draft": ("\x1b[32m", "guessed by the drafter"),
    "retrieval": ("\x1b[36m", "guessed with the retrieval cache"),
    "recovered": ("\x1b[31m", "the target's correction of a guess"),
    "bonus": ("\x1b[33m", "the target's own"),
}
"""The terminal's color for each origin of a token, and its meaning."""
RESET = "\x1b[0m"
LEGEND = "   ".join(f"{color}{meaning}{RESET}" for color, meaning in COLORS.values())
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line feeds


def shown(text: str) -> str:
    """A model's text without the control characters that would command the user's terminal."""
    return CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text


def colored(token: Token) -> str:
    """A token's text in the color of its origin."""
    return f"{COLORS[token.origin][0]}{shown(token.text)}{RESET}" if token.text else ""


def stream(run: "Generation", args: argparse.Namespace, *, show: bool) -> None:
    """Runs one prompt to its end, with a progress bar while it is read; prints the text if `show`.
    A Ctrl-C stops after the next event, a second one at once."""
    from tqdm import tqdm  # with 20 ms of imports, which --help does not need

    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        signal.signal(signal.SIGINT, before)
        is_stopped = True

    total = len(run.rows[0].prompt_ids)
    before = signal.signal(signal.SIGINT, stop)
    hidden = args.quiet or None  # None: where standard error is no terminal
    try:
        with tqdm(total=total, desc="prompt", unit=" tokens", leave=False, disable=hidden) as bar:
            for event in run:
                if isinstance(event, PrefillProgress):
                    bar.update(event.num_done - bar.n)
                elif isinstance(event, Token):
                    bar.close()
                    if show:
                        text = colored(event) if args.color else shown(event.text)
                        print(text, end="", flush=True)
                if is_stopped:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
