"""Output of a run while it goes on: text, a progress bar, colors by origin."""

import re
import signal
import sys
from argparse import Namespace
from typing import Any

import minitri
from minitri import PrefillProgress, Token
from minitri.apps.cli.exits import on_ctrl_c
from minitri.apps.cli.report import progress_bar
from minitri.core.log import log
from minitri.core.roofline import Workload

COLORS = {  # of a token's origin, with its meaning
    "draft": ("\x1b[32m", "guessed by the drafter"),
    "retrieval": ("\x1b[36m", "guessed with the retrieval cache"),
    "recovered": ("\x1b[31m", "the target's correction of a guess"),
    "bonus": ("\x1b[33m", "the target's own"),
}
RESET = "\x1b[0m"
LEGEND = "   ".join(f"{color}{meaning}{RESET}" for color, meaning in COLORS.values())
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line feeds
SLOW = 60  # seconds to read a prompt, above which a log line predicts them


def shown(text: str) -> str:
    """A model's text without control characters, which would command the user's terminal."""
    return CONTROLS.sub("\ufffd", text) if sys.stdout.isatty() else text


def colored(token: Token) -> str:
    """A token's text in the color of its origin."""
    return f"{COLORS[token.origin][0]}{shown(token.text)}{RESET}" if token.text else ""


def print_stream(
    run: "minitri.Generation",
    args: Namespace,
    config: minitri.ModelConfig,
    *,
    show: bool,
    file: Any = None,
) -> None:
    """Runs one prompt with a progress bar, and prints its text if `show`, to `file` or standard
    output. Ctrl-C stops the run after the next event, a second one at once. The time of a long
    prompt is logged, predicted by the target's `config`."""
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        signal.signal(signal.SIGINT, signal.default_int_handler)
        is_stopped = True

    bar = progress_bar(
        args, total=len(run.rows[0].prompt_ids), desc="prompt", unit=" tokens", leave=False
    )
    with on_ctrl_c(stop), bar:
        for event in run:
            if isinstance(event, PrefillProgress):
                if not bar.n:
                    bar.n = bar.initial = bar.last_print_n = event.num_cached
                    left = seconds_left(config, run.stats.prefill_seconds, event)
                    if left > SLOW:
                        bar.clear()
                        log.info("the prompt will be read in about %.1f minutes", left / 60)
                bar.update(event.num_done - bar.n)
            elif isinstance(event, Token):
                bar.close()
                if show:
                    text = colored(event) if args.color else shown(event.text)
                    print(text, end="", flush=True, file=file)
            if is_stopped:
                break


def seconds_left(config: minitri.ModelConfig, seconds: float, read: PrefillProgress) -> float:
    """Seconds to read the rest of a prompt, by FLOPs; the first chunk, `read`, took `seconds`."""
    cached, done, total = (
        Workload(config, None, n // 2, 0).read("target", n - 1).flops
        for n in (read.num_cached, read.num_done, read.num_tokens)
    )
    return seconds * (total - done) / (done - cached)
