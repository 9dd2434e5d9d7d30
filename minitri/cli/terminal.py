"""Shows a run in a terminal: text as it is generated, a progress bar, colors by origin."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from minitri.generation import End, Generation, PrefillProgress, Token

COLORS = {
    "draft": ("\x1b[32m", "guessed by the drafter"),
    "retrieval": ("\x1b[36m", "guessed with the retrieval cache"),
    "recovered": ("\x1b[31m", "the target's correction of a guess"),
    "bonus": ("\x1b[33m", "the target's own"),
}
"""Per origin of a token: the terminal's color and what it means."""
RESET = "\x1b[0m"
BAR = "prompt {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens, {elapsed} passed, {postfix[0]}"


def colored(text: str, origin: str) -> str:
    """A token's text in the color of its origin."""
    return f"{COLORS[origin][0]}{text}{RESET}" if text else ""


def legend() -> str:
    """What the colors mean, in them."""
    return "   ".join(f"{color}{meaning}{RESET}" for color, meaning in COLORS.values())


class PrefillBar:
    """Progress of reading a prompt on standard error, with the time that the rest will take.

    Draws nothing where standard error is no terminal.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def show(self, event: PrefillProgress) -> None:
        """Moves the bar; removes it when the prompt has been read."""
        if self._bar is None:
            self._bar = tqdm(
                total=event.num_tokens, leave=False, bar_format=BAR, postfix=[""],
                disable=True if self._quiet else None,
            )  # fmt: skip
        self._bar.postfix = [f"{event.eta_seconds:.0f} s to go"]
        self._bar.update(event.num_done - self._bar.n)
        if event.num_done == event.num_tokens:
            self.close()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def stream(run: Generation, *, as_json: bool, quiet: bool, color: bool) -> str:
    """Shows a run of one prompt as it goes; returns how it finished, `interrupted` by Ctrl-C."""
    bar = PrefillBar(quiet=quiet)
    try:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.show(event)
            elif isinstance(event, Token) and not as_json:
                text = colored(event.text, event.origin) if color else event.text
                print(text, end="", flush=True)
            elif isinstance(event, End):
                return event.finish_reason
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        bar.close()
        if not as_json:
            print(flush=True)
    raise AssertionError("a run ended without an End event")


def finish(run: Generation, *, quiet: bool) -> End:
    """Runs one prompt to its end behind a progress bar, shows nothing else."""
    bar = PrefillBar(quiet=quiet)
    try:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.show(event)
            elif isinstance(event, End):
                return event
    finally:
        bar.close()
        run.close()
    raise AssertionError("a run ended without an End event")
