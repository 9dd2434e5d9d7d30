"""Checks of a server's sampling, a row of the report each, with a verdict and what it is about."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from minitri.apps.audit.client import BURST, NUM_NEW, Bursts, Client, Place, Text
from minitri.apps.audit.scores import Departures
from minitri.apps.selftest.martingale import Martingale
from minitri.core.errors import InputError
from minitri.core.log import log

PROMPTS = ["The cat sat on the mat. The dog sat on the rug. The cat sat on the"]
PROMPTS += ["She said yes, he said no, she said no, he said yes, she said"]
PAIRS = (("yes", "no"), ("red", "blue"))
PROMPTS += [" ".join(random.Random(0).choices(pair, k=64)) for pair in PAIRS]
"""Prompts that repeat themselves, so that drafters guess, and are open, so that guesses fail."""
TEMPERATURES = (1.0, 0.5, 1.5)
FALSE_ALARM = 1e-6
"""Odds that an audit finds a fault in a correct server."""
LEAST_P = FALSE_ALARM / 10
"""Level of one test: three scores at each temperature, and `copied`."""
LEAST_TOKENS = 200
"""Fewer tokens than this are too few for a verdict."""
TOLERANCE = 0.5
"""Nats by which rounding (in bfloat16, say) may change a log-probability."""
MOST_COPIED = 0.1
"""Share of tokens, beyond chance, that concurrent answers may have in common."""
Row = dict[str, Any]


def audit(client: Client, num_tokens: int) -> Iterator[Row]:
    """Runs all checks. Raises `InputError` where the server does not answer."""
    num_rounds = -(-num_tokens // (len(TEMPERATURES) * len(PROMPTS) * BURST * NUM_NEW))
    has_switch = client.takes(speculation=False) and not client.takes(speculation="sometimes")

    def sample(temperature: float, **fields: Any) -> Bursts:
        log.info("sampling at temperature %g", temperature)
        fields["temperature"] = temperature
        return [(text, client.burst(text, **fields)) for text in PROMPTS * num_rounds]

    texts = {temperature: sample(temperature) for temperature in TEMPERATURES}
    places = [place for _, burst in texts[1.0] for text in burst for place in text]
    if not places:
        raise InputError(f"{client.url} answers with no tokens; audit another model")
    yield (logprobs := check_logprobs(places))
    if logprobs["says"]:
        return
    greedy = [client.ask(text, temperature=0.0) for text in PROMPTS]
    yield check_greedy(greedy)
    yield check_seed(client)
    if has_switch:
        plain = [client.ask(text, temperature=0.0, speculation=False) for text in PROMPTS]
        yield check_speculation(greedy, plain)
    else:
        yield {"check": "speculation", "verdict": "skipped", "says": "no request switches it off"}
    yield (independence := check_independence(texts[1.0]))
    is_before = spread(texts[0.5]) < 1.5 * spread(texts[1.0])
    for temperature in TEMPERATURES if independence["verdict"] == "ok" else ():
        # Log-probabilities are reported before the temperature, or after it.
        power = 1 / temperature if is_before else 1.0
        result = check_texts(texts[temperature], temperature, power)
        if result["verdict"] == "FAULT" and has_switch:
            alone = Departures(sample(temperature, speculation=False), power)
            result["says"] += f"; without speculation p is {alone.worst.p_value:.2g}"
        yield result


def row(check: str, fault: str, statistic: float, num_tokens: int) -> Row:
    """A row of the audit's report; `fault` says what is wrong, and is empty if nothing is."""
    verdict = {"check": check, "verdict": "FAULT" if fault else "ok", "says": fault}
    return verdict | {"statistic": statistic, "num_tokens": num_tokens}


def tested(check: str, fault: str, test: Martingale) -> Row:
    """A row of the audit's report on a statistical test, with its p-value."""
    return row(check, fault, test.mean, test.num_tokens) | {"p_value": test.p_value}


def spread(bursts: Bursts) -> float:
    """Spread of the log-probabilities at the first token of the answers: best minus mean."""
    texts = [burst[0] for _, burst in bursts[: len(PROMPTS)] if burst[0]]
    tops = [text[0].top.values() for text in texts]
    return sum(max(top) - sum(top) / len(top) for top in tops)


def check_logprobs(places: Sequence[Place]) -> Row:
    """Are the reported log-probabilities those of a distribution?"""
    most = max(sum(map(math.exp, place.top.values())) for place in places)
    fault = f"log-probabilities of one place sum to {most:.2f} > 1" if most > 1.01 else ""
    if not any(place.logprob for place in places):
        fault = "all log-probabilities are 0"
    return row("logprobs", fault, most, len(places))


def check_greedy(texts: Sequence[Text]) -> Row:
    """Is every token at temperature 0 the likeliest one?"""
    places = [place for text in texts for place in text]
    worst = max((max(place.top.values()) - place.logprob for place in places), default=0.0)
    fault = f"a token is {worst:.2f} nats below the argmax" if worst > TOLERANCE else ""
    return row("greedy", fault, worst, len(places))


def check_seed(client: Client) -> Row:
    """Does one seed give one text, alone and in a batch?"""
    fields = {"temperature": 1.0, "seed": 1}
    texts = [client.ask(PROMPTS[0], **fields), *client.burst(PROMPTS[0], **fields)]
    num_texts = len({tuple(place.token for place in text) for text in texts})
    fault = f"one seed gives {num_texts} texts, alone and next to others" if num_texts > 1 else ""
    return row("seed", fault, num_texts, sum(map(len, texts)))


def check_speculation(texts: Sequence[Text], plain: Sequence[Text]) -> Row:
    """Are log-probabilities the same without speculation, up to where greedy texts differ?"""
    worst = 0.0
    for pair in zip(texts, plain, strict=True):
        for one, other in zip(*pair, strict=False):
            changes = [abs(log - other.top.get(name, log)) for name, log in one.top.items()]
            worst = max(worst, *changes)
            if one.token != other.token:
                break
    fault = f"speculation changes log-probabilities by {worst:.2f}" if worst > TOLERANCE else ""
    return row("speculation", fault, worst, sum(map(len, plain)))


def check_independence(bursts: Bursts) -> Row:
    """Do concurrent answers use independent random numbers?"""
    copied = Departures(bursts, 1.0).copied
    fault = ""
    if copied.p_value < LEAST_P and copied.mean > MOST_COPIED:
        fault = "concurrent answers copy each other: they share random numbers, or use none"
    return tested("independence", fault, copied)


def check_texts(bursts: Bursts, temperature: float, power: float) -> Row:
    """Do texts follow the reported log-probabilities, raised to a power?"""
    is_whole = all(len(text) == NUM_NEW for _, burst in bursts for text in burst)
    scores = Departures(bursts, power, beyond=is_whole and power == 1)
    is_fault = scores.worst.p_value < LEAST_P
    fault = "texts do not follow the reported log-probabilities" if is_fault else ""
    result = tested(f"texts, T={temperature:g}", fault, scores.worst)
    if scores.likelihood.num_tokens < LEAST_TOKENS:  # which every token counts for
        result |= {"verdict": "skipped", "says": f"{result['num_tokens']} tokens are too few"}
    return result
