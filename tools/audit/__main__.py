"""The audit: is an OpenAI-compatible server's sampling lossless?

    python -m tools.audit http://127.0.0.1:8000 --json

Exit codes: 0 lossless, 1 a fault, 2 bad input. Prints a table, or with --json one JSON object.

Only the likeliest tokens of a place are reported, so scores are of the token *given that it is one
of those*, whose distribution is known at every temperature. `likelihood` is its probability over
the largest one; it detects distributions that are too sharp or too flat. `learned` is how much too
often the token came so far after the same token; it detects departures that recur, such as traces
of a drafter. `copied` is the share of concurrent answers, equal so far, that continued with the
token.
"""

import contextlib
import json
import math
import os
import re
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minitri.apps.cli import report
from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program
from minitri.apps.selftest.martingale import Martingale
from minitri.core.errors import InputError
from minitri.core.log import log
from tools.audit.client import BURST, NUM_NEW, Bursts, Client, Place, connect
from tools.flags import positive

COLUMNS = "check verdict statistic p_value num_tokens"
PROMPTS = Path(__file__).with_name("prompts.txt").read_text("utf-8").splitlines()
"""Prompts that repeat themselves, so that drafters guess, and are open, so that guesses fail."""
TEMPERATURES = (1.0, 0.5, 1.5)
FALSE_ALARM = 1e-6  # odds that an audit finds a fault in a correct server
LEAST_P = FALSE_ALARM / 10  # of one test: two scores at each temperature, and `copied`
LEAST_TOKENS = 200  # fewer, at one temperature, are too few for a verdict
TOLERANCE = 0.5  # nats by which rounding (in bfloat16, say) may change a log-probability
MOST_COPIED = 0.1  # share of tokens, beyond chance, that concurrent answers may have in common
COPIED = "concurrent answers copy each other: they share random numbers, or use none"
DEPARTED = "texts do not follow the reported log-probabilities"
IS_ODD = re.compile("<.*>|.*\ufffd.*|", re.DOTALL)
"""Names of special tokens, which texts may not show, and of parts of characters."""


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.audit", description=__doc__)
    add = parser.add_argument
    add("url", metavar="URL", help="of an OpenAI-compatible server")
    add("-m", "--model", help="which of its models (default: its first)")
    add("--api-key", help="what it asks for (default: MINITRI_API_KEY)")
    text = "to sample from the server (default: 12288)"
    add("--num-tokens", type=positive, default=12288, metavar="N", help=text)
    parser.add_flags("json")
    return parser


def run_command(args: Namespace) -> int:
    """Audits the server that the flags name; returns the exit code."""
    client = connect(args.url, args.api_key or os.environ.get("MINITRI_API_KEY"), args.model)
    with contextlib.closing(client.http):
        rows = [*audit(client, args.num_tokens)]
    is_lossless = all(row["verdict"] != "FAULT" for row in rows)
    if args.json:
        result = {
            "url": client.url,
            "endpoint": client.endpoint,
            "model": client.fields["model"],
            "lossless": is_lossless,
            "false_alarm": FALSE_ALARM,
            "checks": rows,
        }
        print(json.dumps(result))
    else:
        says = ["{verdict} {check}: {says}".format(**row) for row in rows if row["says"]]
        print(report.as_table(COLUMNS, rows), "", *says, sep="\n")
    return int(not is_lossless)


def audit(client: Client, num_tokens: int) -> Iterator[report.Json]:
    """Runs all checks of a server's sampling. Raises `InputError` where there is no answer."""
    num_rounds = -(-num_tokens // (len(TEMPERATURES) * len(PROMPTS) * BURST * NUM_NEW))
    texts: dict[float, Bursts] = {}
    for T in TEMPERATURES:
        log.info("sampling at temperature %g", T)
        texts[T] = [client.burst(prompt, temperature=T) for prompt in PROMPTS * num_rounds]
    places = [place for burst in texts[1.0] for text in burst for place in text]
    if len(places) < LEAST_TOKENS:
        raise InputError(f"{client.url} sends {len(places)} tokens, too few; audit another model")
    logprobs = check_logprobs(places)
    yield logprobs
    if logprobs["says"]:
        return
    yield check_greedy(client)
    # Log-probabilities are reported before the temperature, or after it.
    is_before = spread(texts[0.5]) < 1.5 * spread(texts[1.0])
    for T, bursts in texts.items():
        likelihood, learned, copied = departures(bursts, 1 / T if is_before else 1.0)
        if T == 1:
            is_copied = copied.p_value < LEAST_P and copied.mean > MOST_COPIED
            yield row("independence", COPIED * is_copied, **figures(copied))
            if is_copied:
                return
        worst = min(likelihood, learned, key=lambda test: test.p_value)
        yield row(f"texts, T={T:g}", DEPARTED * (worst.p_value < LEAST_P), **figures(worst))


def row(check: str, fault: str, **figures: float) -> report.Json:
    """A row of the audit's report; `fault` says what is wrong, and is empty if nothing is."""
    return {"check": check, "verdict": "FAULT" if fault else "ok", "says": fault, **figures}


def spread(bursts: Bursts) -> float:
    """Spread of the log-probabilities at the first token of the answers: best minus mean."""
    tops = [burst[0][0].top.values() for burst in bursts[: len(PROMPTS)] if burst[0]]
    return sum(max(top) - sum(top) / len(top) for top in tops)


def check_logprobs(places: Sequence[Place]) -> report.Json:
    """Checks that the log-probabilities of each token sum to 1 at most; a row of the report."""
    most = max(sum(map(math.exp, place.top.values())) for place in places)
    fault = f"log-probabilities of one place sum to {most:.2f} > 1" if most > 1.01 else ""
    if not any(place.logprob for place in places):
        fault = "all log-probabilities are 0"
    return row("logprobs", fault, statistic=most, num_tokens=len(places))


def check_greedy(client: Client) -> report.Json:
    """Checks that a server's tokens at temperature 0 are the likeliest; a row of the report."""
    places = [place for text in PROMPTS for place in client.ask(text, temperature=0.0)]
    worst = max((max(place.top.values()) - place.logprob for place in places), default=0.0)
    fault = f"a token is {worst:.2f} nats below the argmax" if worst > TOLERANCE else ""
    return row("greedy", fault, statistic=worst, num_tokens=len(places))


def figures(test: Martingale) -> dict[str, float]:
    """Figures of a statistical test, for a row of the audit's report."""
    return {"statistic": test.mean, "num_tokens": test.num_tokens, "p_value": test.p_value}


def departures(bursts: Bursts, power: float) -> Sequence[Martingale]:
    """Statistical tests that tokens follow the reported probabilities, raised to `power`."""
    import numpy as np  # with 100 ms of imports, which --help does not need

    likelihood, learned, copied = (Martingale() for _ in range(3))
    # How often a token came after another one, and how often it was expected there.
    counted: defaultdict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(2))
    for burst in bursts:
        others: Counter[tuple[str, ...]] = Counter()  # beginnings of the answers before
        for text in burst:
            names: tuple[str, ...] = ("",)
            for place in text:
                known = [name for name in place.top if not IS_ODD.fullmatch(name)]
                if place.token in known:
                    weights = np.exp([power * place.top[name] for name in known])
                    p = weights / weights.sum()
                    drawn = known.index(place.token)
                    likelihood.add(drawn, p, p / p.max())
                    counts = np.array([others[*names, name] for name in known])
                    if counts.any():
                        copied.add(drawn, p, counts / counts.sum())
                    pairs = [(names[-1], name) for name in known]
                    came, expected = np.transpose([counted[pair] for pair in pairs])
                    excesses = (came - expected) / np.sqrt(1 + expected)
                    learned.add(drawn, p, (1 + np.tanh(excesses)) / 2)
                    for n, pair in enumerate(pairs):
                        counted[pair] += n == drawn, p[n]
                names += (place.token,)
            others.update(names[: n + 1] for n in range(1, len(names)))
    return likelihood, learned, copied


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
