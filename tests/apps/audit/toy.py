"""A server of OpenAI's API without the network: a Markov chain of words, sound or with faults."""

import functools
import itertools
import math
import random

from minitri.core.errors import InputError

WORDS = [f" {letter}" for letter in "abcdefghijkl"]
TARGET, DRAFTER = 1, 2
Probs = dict[str, float]


def normalized(weights: Probs) -> Probs:
    total = sum(weights.values())
    return {word: weight / total for word, weight in weights.items()}


@functools.cache
def distribution(model: int, before: str, temperature: float = 1.0) -> Probs:
    """Of the word after another one."""
    source = random.Random(f"{model}{before}")
    logits = {word: 1.2 * source.gauss(0, 1) for word in WORDS}
    if not temperature:
        return {word: float(logit == max(logits.values())) for word, logit in logits.items()}
    return normalized({word: math.exp(logit / temperature) for word, logit in logits.items()})


class Toy:
    """The server's side, with faults or properties by name."""

    def __init__(self, names: str) -> None:
        self.names = names.split(", ")
        self._numbers = itertools.count()

    def call(self, path: str, body: dict | None = None) -> dict:
        """The JSON at a path, as of `Client.call`."""
        if body is None:
            return {"data": [{"id": "toy"}]}
        endpoint = "/chat/completions" if "chat" in self.names else "/completions"
        if (path, body.get("top_logprobs", body["logprobs"])) != (endpoint, 5):
            raise InputError("this is not here", "ask for something else")
        temperature, count = body.get("temperature", 1.0), body["max_tokens"]
        number = next(self._numbers)
        source = random.Random(number // 2 if "one random number" in self.names else number)
        words = [""]
        for _ in range(count):
            words += source.choices(WORDS, self._sampled(words[-1], temperature).values())
        if "silent" in self.names or ("silent if greedy" in self.names and not temperature):
            words = words[: 1 + (count == 1)]
        logs = [self._reported(before, temperature) for before in words[:-1]]
        pairs = [(word, top[word]) for word, top in zip(words[1:], logs, strict=True)]
        tops = [sorted(top.items(), key=lambda pair: -pair[1])[:5] for top in logs]
        if "untold" in self.names:
            tops[1:2] = [[]] * (count > 1)
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
        """The distribution of the next word, by speculative sampling."""
        p, q = (self._probs(model, before, temperature) for model in (TARGET, DRAFTER))
        if "recovered" in self.names:  # from p, not from the residual
            accepted = {word: min(p[word], q[word]) for word in p}
            p = {word: accepted[word] + (1 - sum(accepted.values())) * p[word] for word in p}
        return p

    def _probs(self, model: int, before: str, temperature: float) -> Probs:
        """The distribution that is sampled at a temperature."""
        if "greedy" in self.names and not temperature:
            before = WORDS[0]
        if "temperature" in self.names and temperature:
            temperature = 1.0
        probs = distribution(model, before, temperature)
        if "top-k" in self.names:
            least = sorted(probs.values())[-5]
            probs = normalized({word: prob * (prob >= least) for word, prob in probs.items()})
        return probs

    def _reported(self, before: str, temperature: float) -> Probs:
        """Log-probabilities that the server tells of the word after another."""
        is_after = "reported after temperature" in self.names
        probs = distribution(TARGET, before, temperature if is_after else 1.0)
        logs = {word: math.log(prob) if prob else -99.0 for word, prob in probs.items()}
        return dict.fromkeys(logs, 0.0) if "zeros" in self.names else logs


def entry(token: str, log: float) -> dict:
    return {"token": token, "logprob": log}
