"""A server of OpenAI's API without the network: a Markov chain of words, sound or with faults."""

import functools
import itertools
import math
import random

from minitri.core.errors import InputError

WORDS = [f" {letter}" for letter in "abcdefghijkl"]
Probs = dict[str, float]


def normalized(weights: Probs) -> Probs:
    total = sum(weights.values())
    return {word: weight / total for word, weight in weights.items()}


@functools.cache
def distribution(before: str, temperature: float = 1.0) -> Probs:
    """The probabilities of the word after another one."""
    source = random.Random(before)
    logits = {word: 1.2 * source.gauss(0, 1) for word in WORDS}
    if not temperature:
        return {word: float(logit == max(logits.values())) for word, logit in logits.items()}
    return normalized({word: math.exp(logit / temperature) for word, logit in logits.items()})


class Toy:
    """The server's side, with a fault or a property by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers = itertools.count()

    def call(self, path: str, body: dict | None = None) -> dict:
        """The JSON at a path, as of `Client.call`."""
        if body is None:
            return {"data": [{"id": "toy"}]}
        endpoint = "/chat/completions" if self.name == "chat" else "/completions"
        if (path, body.get("top_logprobs", body["logprobs"])) != (endpoint, 5):
            raise InputError("this is not here", "ask for something else")
        temperature = body.get("temperature", 1.0)
        number = next(self._numbers)
        source = random.Random(number // 2 if self.name == "one random number" else number)
        words = [""]
        for _ in range(body["max_tokens"]):
            words += source.choices(WORDS, self._sampled(words[-1], temperature).values())
        logs = [self._reported(before, temperature) for before in words[:-1]]
        pairs = [(word, top[word]) for word, top in zip(words[1:], logs, strict=True)]
        tops = [sorted(top.items(), key=lambda pair: -pair[1])[:5] for top in logs]
        if "messages" in body:
            content = [
                entry(*pair) | {"top_logprobs": [entry(*other) for other in top]}
                for pair, top in zip(pairs, tops, strict=True)
            ]
            return {"choices": [{"logprobs": {"content": content}}]}
        logprobs = {"tokens": words[1:], "token_logprobs": [log for _, log in pairs]}
        logprobs["top_logprobs"] = [*map(dict, tops)]
        return {"choices": [{"text": "".join(words), "logprobs": logprobs}]}

    def _sampled(self, before: str, temperature: float) -> Probs:
        """The distribution that is sampled at a temperature."""
        if self.name == "greedy" and not temperature:
            before = WORDS[0]
        probs = distribution(before, temperature)
        if self.name == "recovered":  # from p, not from the residual, if a guess is rejected
            q = distribution(f"guess {before}", temperature)
            accepted = {word: min(prob, q[word]) for word, prob in probs.items()}
            rest = 1 - sum(accepted.values())
            probs = {word: accepted[word] + rest * prob for word, prob in probs.items()}
        return probs

    def _reported(self, before: str, temperature: float) -> Probs:
        """Log-probabilities that the server tells of the word after another."""
        is_after = self.name == "reported after temperature"
        probs = distribution(before, temperature if is_after else 1.0)
        logs = {word: math.log(prob) if prob else -99.0 for word, prob in probs.items()}
        return dict.fromkeys(logs, 0.0) if self.name == "zeros" else logs


def entry(token: str, log: float) -> dict:
    return {"token": token, "logprob": log}
