"""Shows a run as it goes: text or a line of JSON per token, a progress bar, colors by origin."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing

from tqdm import tqdm

from minitri.generation import Generation
from minitri.requests import End, PrefillProgress, Token

COLORS = {
    "draft": ("\x1b[32m", "guessed by the drafter"),
    "retrieval": ("\x1b[36m", "guessed with the retrieval cache"),
    "recovered": ("\x1b[31m", "the target's correction of a guess"),
    "bonus": ("\x1b[33m", "the target's own"),
}
"""Per origin of a token: the terminal's color and what it means."""
RESET = "\x1b[0m"
LEGEND = "   ".join(f"{color}{meaning}{RESET}" for color, meaning in COLORS.values())
BAR = "prompt {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens, {elapsed}, {remaining} left"


def with_bar(run: Generation, *, quiet: bool) -> Iterator[Token | End]:
    """The tokens of one prompt and their end, with a progress bar while the prompt is read.

    Nothing is drawn where standard error is no terminal.
    """
    total = run.rows[0].num_prompt_tokens
    with tqdm(total=total, leave=False, bar_format=BAR, disable=True if quiet else None) as bar:
        for event in run:
            if isinstance(event, Token | End):
                yield event
            elif isinstance(event, PrefillProgress):
                bar.update(event.num_done - bar.n)
                if event.num_done == event.num_tokens:
                    bar.close()


def plain(token: Token) -> str:
    """A token as text."""
    return token.text


def colored(token: Token) -> str:
    """A token as text in the color of its origin."""
    return f"{COLORS[token.origin][0]}{token.text}{RESET}" if token.text else ""


def json_line(token: Token) -> str:
    """A token as a line of JSON."""
    shown = {name: getattr(token, name) for name in ("token_id", "text", "origin")}
    if token.logprob is not None:
        shown |= {"logprob": token.logprob, "top_logprobs": token.top_logprobs}
    return json.dumps(shown) + "\n"


def nothing(_: Token) -> str:
    """No token is shown."""
    return ""


def stream(
    run: Generation, show: Callable[[Token], str], *, quiet: bool
) -> tuple[str, list[Token]]:
    """Shows a run of one prompt; returns how it ended, `interrupted` by Ctrl-C, and its tokens."""
    tokens: list[Token] = []
    try:
        for event in with_bar(run, quiet=quiet):
            if isinstance(event, End):
                return event.finish_reason, tokens
            tokens.append(event)
            print(show(event), end="", flush=True)
    except KeyboardInterrupt:
        pass
    return "interrupted", tokens


def finish(run: Generation, *, quiet: bool) -> End:
    """Runs one prompt to its end with a progress bar, shows nothing else."""
    with closing(run):
        return next(event for event in with_bar(run, quiet=quiet) if isinstance(event, End))
