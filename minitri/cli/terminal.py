"""Shows a run as it goes: text, a progress bar, colors by origin."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from tqdm import tqdm

from minitri import End, PrefillProgress, Token
from minitri.log import log

if TYPE_CHECKING:
    from minitri import Generation

COLORS = {
    "draft": ("\x1b[32m", "guessed by the drafter"),
    "retrieval": ("\x1b[36m", "guessed with the retrieval cache"),
    "recovered": ("\x1b[31m", "the target's correction of a guess"),
    "bonus": ("\x1b[33m", "the target's own"),
}
"""Per origin of a token: the terminal's color and what it means."""
RESET = "\x1b[0m"
LEGEND = "   ".join(f"{color}{meaning}{RESET}" for color, meaning in COLORS.values())


def plain(token: Token) -> str:
    """A token as text."""
    return token.text


def colored(token: Token) -> str:
    """A token as text in the color of its origin."""
    return f"{COLORS[token.origin][0]}{token.text}{RESET}" if token.text else ""


def nothing(token: Token) -> str:  # noqa: ARG001 (what `stream` calls)
    """No token is shown."""
    return ""


def stream(
    run: "Generation", show: Callable[[Token], str], *, quiet: bool
) -> tuple[str, list[Token]]:
    """Shows a run of one prompt, with a progress bar on a terminal while that is read; returns how
    it ended, and its tokens: after a Ctrl-C as `interrupted`, with the next event."""
    tokens: list[Token] = []
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        signal.signal(signal.SIGINT, before)
        is_stopped = True
        log.info("stopping after this step; another Ctrl-C stops at once")

    total = len(run.rows[0].prompt)
    hidden = True if quiet else None
    before = signal.signal(signal.SIGINT, stop)
    try:
        with tqdm(total=total, desc="prompt", unit=" tokens", leave=False, disable=hidden) as bar:
            for event in run:
                if isinstance(event, End):
                    return event.finish_reason, tokens
                if isinstance(event, PrefillProgress):
                    bar.update(event.num_done - bar.n)
                elif isinstance(event, Token):
                    bar.close()
                    tokens.append(event)
                    print(show(event), end="", flush=True)
                if is_stopped:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    return "interrupted", tokens
