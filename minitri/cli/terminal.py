"""Shows a run as it goes: text or a line of JSON per token, a progress bar, colors by origin."""

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator

from tqdm import tqdm

from minitri.generation import Generation
from minitri.requests import End, Event, PrefillProgress, Token

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


def json_line(token: Token) -> str:
    """A token as a line of JSON."""
    names = ["token_id", "text", "origin"]
    names += [] if token.logprob is None else ["logprob", "top_logprobs"]
    return json.dumps({name: getattr(token, name) for name in names}) + "\n"


def nothing(_: Token) -> str:
    """No token is shown."""
    return ""


def stream(
    run: Generation,
    show: Callable[[Token], str],
    *,
    quiet: bool,
    stopped: threading.Event | None = None,
) -> tuple[str, list[Token]]:
    """Shows a run of one prompt; returns how it ended, and its tokens.

    It ends as `interrupted` after an event that `stopped` is set in, and at once by Ctrl-C.
    """
    tokens: list[Token] = []
    with contextlib.suppress(KeyboardInterrupt):
        for event in with_bar(run, quiet=quiet):
            if isinstance(event, End):
                return event.finish_reason, tokens
            if isinstance(event, Token):
                tokens.append(event)
                print(show(event), end="", flush=True)
            if stopped is not None and stopped.is_set():
                break
    return "interrupted", tokens


@contextlib.contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Ctrl-C sets the event that this gives, and interrupts nothing; a second one does."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def finish(run: Generation, *, quiet: bool) -> End:
    """Runs one prompt to its end with a progress bar, shows nothing else."""
    *_, end = with_bar(run, quiet=quiet)
    assert isinstance(end, End)
    return end


def with_bar(run: Generation, *, quiet: bool) -> Iterator[Event]:
    """The events of one prompt, with a progress bar on a terminal while the prompt is read."""
    total = run.rows[0].num_prompt_tokens
    hidden = True if quiet else None
    with tqdm(total=total, desc="prompt", unit=" tokens", leave=False, disable=hidden) as bar:
        for event in run:
            if isinstance(event, PrefillProgress):
                bar.update(event.num_done - bar.n)
            else:
                bar.close()
            yield event
