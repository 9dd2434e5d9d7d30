"""The checks of an audit, one row each: a verdict, what was found, and what would be noticed."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from minitri.apps.audit.client import Bursts, Client, Text
from minitri.apps.audit.scores import Departures
from minitri.apps.selftest.martingale import Martingale
from minitri.core.errors import InputError
from minitri.core.log import log

PROMPTS = ["The cat sat on the mat. The dog sat on the rug. The cat sat on the"]
PROMPTS += ["She said yes, he said no, she said no, he said yes, she said"]
PROMPTS += [" ".join(random.Random(0).choices(it, k=64)) for it in (("yes", "no"), ("red", "blue"))]
"""Which repeat themselves, so that drafters guess, and go on in several ways, so that they fail."""
NUM_NEW = 32
BURST = 8
"""Equal requests at one time."""
TEMPERATURES = (1.0, 0.5, 1.5)
FALSE_ALARM = 1e-6
"""Odds that an audit finds fault with a lossless server."""
LEAST_P = FALSE_ALARM / 10
"""Of one test: three scores at each temperature, and `copied`."""
LEAST_TOKENS = 200
"""Of which a test tells anything."""
TOLERANCE = 0.5
"""Nats by which rounding (in bfloat16, say) may change a log-probability."""
MOST_COPIED = 0.1
"""Of the tokens of concurrent answers, beyond chance."""
GREEDY = 50.0
"""The power of probabilities that leaves the likeliest tokens only."""
Row = dict[str, Any]


def audit(client: Client, num_tokens: int) -> Iterator[Row]:
    """All checks. Raises `InputError` where the server does not answer."""
    num_rounds = -(-num_tokens // (len(TEMPERATURES) * len(PROMPTS) * BURST * NUM_NEW))
    has_switch = client.takes(speculation=False) and not client.takes(speculation="sometimes")

    def sample(**fields: Any) -> Bursts:
        log.info("sampling: %s", fields)
        return [client.burst(BURST, it, NUM_NEW, **fields) for it in PROMPTS * num_rounds]

    texts = {it: sample(temperature=it) for it in TEMPERATURES}
    places = [place for _, burst in texts[1.0] for text in burst for place in text]
    if not places:
        raise InputError(f"{client.url} answers with no tokens; audit another model")
    most = max(sum(map(math.exp, it.top.values())) for it in places)
    fault = f"log-probabilities of one place sum to {most:.2f} > 1" if most > 1.01 else ""
    if not any(it.logprob for it in places):
        fault = "all log-probabilities are 0"
    is_before = spread(texts[0.5]) < 1.5 * spread(texts[1.0])
    notices = f"a sum > 1.01; told {'before' if is_before else 'after'} temperature"
    yield row("logprobs", fault, most, len(places), notices)
    if fault:
        return
    greedy = [client.ask(it, NUM_NEW, temperature=0.0) for it in PROMPTS]
    gaps = (max(it.top.values()) - it.logprob for text in greedy for it in text)
    worst = max(gaps, default=0.0)
    fault = f"a token is {worst:.2f} nats below the argmax" if worst > TOLERANCE else ""
    yield row("greedy", fault, worst, sum(map(len, greedy)), f"{TOLERANCE} nats below the argmax")
    seeded = [client.ask(PROMPTS[0], NUM_NEW, temperature=1.0, seed=1)]
    seeded += client.burst(BURST, PROMPTS[0], NUM_NEW, temperature=1.0, seed=1)[1]
    num_texts = len({tuple(place.token for place in text) for text in seeded})
    fault = f"one seed gives {num_texts} texts, alone and next to others" if num_texts > 1 else ""
    yield row("seed", fault, num_texts, sum(map(len, seeded)), "a second text")
    if has_switch:
        plain = [client.ask(it, NUM_NEW, temperature=0.0, speculation=False) for it in PROMPTS]
        yield check_speculation(greedy, plain)
    else:
        yield {"check": "speculation", "verdict": "skipped", "says": "no request switches it off"}
    yield (found := check_independence(texts[1.0]))
    for temperature in TEMPERATURES if found["verdict"] == "ok" else ():
        power = 1 / temperature if is_before else 1.0
        found = check_texts(texts[temperature], temperature, power)
        if "speculation" in found["says"] and has_switch:
            alone = Departures(sample(temperature=temperature, speculation=False), power)
            found["says"] += f"; without speculation p is {alone.worst.p_value:.2g}"
        yield found


def row(check: str, fault: str, statistic: float, num_tokens: int, notices: str) -> Row:
    """A row of the table; `fault` says which, if there is one."""
    found: Row = {"check": check, "verdict": "FAULT" if fault else "ok", "says": fault}
    return found | {"statistic": statistic, "num_tokens": num_tokens, "notices": notices}


def tested(check: str, fault: str, test: Martingale) -> Row:
    """The row of a statistical test."""
    notices = f"{test.noticed(LEAST_P):.2g} a token"
    found = row(check, fault, test.mean, test.num_tokens, notices)
    return found | {"p_value": test.p_value}


def spread(bursts: Bursts) -> float:
    """How far apart log-probabilities are where the answers to the prompts begin."""
    texts = [burst[0] for _, burst in bursts[: len(PROMPTS)] if burst[0]]
    tops = [text[0].top.values() for text in texts]
    return sum(max(top) - sum(top) / len(top) for top in tops)


def check_speculation(texts: Sequence[Text], plain: Sequence[Text]) -> Row:
    """Are log-probabilities the same without, up to where greedy texts part?"""
    worst = 0.0
    for pair in zip(texts, plain, strict=True):
        for one, other in zip(*pair, strict=False):
            worst = max(worst, *(abs(log - other.top.get(it, log)) for it, log in one.top.items()))
            if one.token != other.token:
                break
    fault = f"speculation changes log-probabilities by {worst:.2f}" if worst > TOLERANCE else ""
    return row("speculation", fault, worst, sum(map(len, plain)), f"{TOLERANCE} nats of difference")


def check_independence(bursts: Bursts) -> Row:
    """Do concurrent answers use random numbers of their own?"""
    copied = Departures(bursts, 1.0).copied
    fault = ""
    if copied.p_value < LEAST_P and copied.mean > MOST_COPIED:
        fault = "concurrent answers copy each other: one random number serves several rows"
        if Departures(bursts, GREEDY).worst.p_value > LEAST_P:
            fault = "at temperature 1 all tokens are the argmax"
    return tested("independence", fault, copied)


def check_texts(bursts: Bursts, temperature: float, power: float) -> Row:
    """Do texts follow the log-probabilities that are told, raised to a power?"""
    is_whole = all(len(text) == NUM_NEW for _, burst in bursts for text in burst)
    found = Departures(bursts, power, beyond=is_whole and power == 1)
    fault = ""
    if found.worst.p_value < LEAST_P:
        often = f"{found.factor:.2f} times as often as told" if found.factor else "too often"
        fault = f"some tokens come {often}"
        if found.factor < 2:  # the most that comes of it
            fault = f"what drafts favor comes {often}, as if recovered tokens were sampled from p "
            fault += "instead of the residual: speculation is not lossless"
        causes = {
            "a filter (top-k, top-p, min-p) leaves out unlikely tokens": power,
            "temperature is ignored": power * temperature,
            "temperature is applied twice": power / temperature,
            "all tokens are the argmax": GREEDY,
        }
        for cause, other in causes.items():
            is_new = other != power or (power == 1 and "filter" in cause)
            if is_new and Departures(bursts, other).worst.p_value > math.sqrt(LEAST_P):
                fault = cause
                break
    told = tested(f"texts, T={temperature:g}", fault, found.worst)
    if found.likelihood.num_tokens < LEAST_TOKENS:  # of all texts
        told |= {"verdict": "skipped", "says": f"{told['num_tokens']} tokens are too few to tell"}
    return told
