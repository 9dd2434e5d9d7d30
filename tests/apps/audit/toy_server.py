"""Small servers of OpenAI's API over a Markov chain of words: a sound one, and one for each fault.

Texts are made by speculative sampling: a drafter's guesses, accepted or corrected.
"""

import contextlib
import itertools
import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = [f" {letter}" for letter in "abcdefghijkl"]
NUM_DRAFTED = 3
Probs = dict[str, float]


def normalized(weights: Probs) -> Probs:
    total = sum(weights.values())
    return {word: weight / total for word, weight in weights.items()}


def chain(seed: int) -> dict[str, Probs]:
    """By the word before, the distribution of the next."""
    source = random.Random(seed)
    return {
        before: normalized({word: math.exp(1.2 * source.gauss(0, 1)) for word in WORDS})
        for before in ["", *WORDS]
    }


TARGET, DRAFTER = chain(1), chain(2)


def tempered(probs: Probs, temperature: float) -> Probs:
    if not temperature:
        best = max(probs, key=lambda word: probs[word])
        return {word: float(word == best) for word in probs}
    return normalized({word: prob ** (1 / temperature) for word, prob in probs.items()})


def draw(probs: Probs, source: random.Random) -> str:
    return source.choices(list(probs), list(probs.values()))[0]


class Toy:
    """The server's side of one fault, or of none."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self._numbers = itertools.count()

    def answer(self, body: dict) -> dict:
        """The JSON of an answer."""
        temperature, count = body.get("temperature", 1.0), body["max_tokens"]
        number = next(self._numbers)
        source = random.Random(number // 2 if self.fault == "one random number" else number)
        words = [""]
        while len(words) <= count:
            words += self._block(words[-1], temperature, source)
        words = words[: count + 1]
        if self.fault == "silent" or (self.fault == "silent if greedy" and not temperature):
            words = words[: 1 + (count == 1)]
        logs = [self._reported(before, temperature) for before in words[:-1]]
        pairs = [(word, top[word]) for word, top in zip(words[1:], logs, strict=True)]
        tops = [sorted(top.items(), key=lambda pair: -pair[1])[:5] for top in logs]
        if self.fault == "untold":
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

    def _block(self, before: str, temperature: float, source: random.Random) -> list[str]:
        """What one round of drafting and verification adds."""
        block: list[str] = []
        for _ in range(NUM_DRAFTED):
            p = self._probs(TARGET[before], temperature)
            q = self._probs(DRAFTER[before], temperature)
            guess = draw(q, source)
            if source.random() * q[guess] >= p[guess]:
                residual = {word: max(p[word] - q[word], 0.0) for word in p}
                return [*block, draw(p if self.fault == "recovered" else residual, source)]
            block.append(guess)
            before = guess
        return [*block, draw(self._probs(TARGET[before], temperature), source)]

    def _probs(self, probs: Probs, temperature: float) -> Probs:
        """What is sampled from where it should be `probs` at a temperature."""
        match self.fault:
            case "argmax":
                temperature = 0.0
            case "greedy" if not temperature:
                probs = {word: -prob for word, prob in probs.items()}
            case "temperature" if temperature:
                temperature = 1.0
            case "temperature twice":
                temperature **= 2
            case "top-k" if temperature:
                least = sorted(probs.values())[-8]
                probs = normalized({word: prob * (prob >= least) for word, prob in probs.items()})
        return tempered(probs, temperature)

    def _reported(self, before: str, temperature: float) -> Probs:
        """Log-probabilities that the server tells of the word after another."""
        probs = TARGET[before]
        if self.fault == "reported after temperature":
            probs = tempered(probs, temperature)
        logs = {word: math.log(prob) if prob else -99.0 for word, prob in probs.items()}
        return dict.fromkeys(logs, 0.0) if self.fault == "zeros" else logs


def entry(token: str, log: float) -> dict:
    return {"token": token, "logprob": log}


class Handler(BaseHTTPRequestHandler):
    """The HTTP of the server's `toy`."""

    def do_GET(self) -> None:
        if self.server.toy.fault != "moved":
            self._send(200, {"data": [{"id": "toy"}]})
        elif self.path != "/elsewhere":
            self._send(302, {}, Location="/elsewhere")
        else:
            self._send(403, {"key": self.headers["Authorization"]})

    def do_POST(self) -> None:
        toy = self.server.toy
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = "chat/" if toy.fault == "chat" else ""
        num_top = body.get("top_logprobs", body.get("logprobs"))
        is_here = self.path == f"/v1/{kind}completions" and num_top == 5
        self._send(200 if is_here else 400, toy.answer(body) if is_here else {"error": "not here"})

    def _send(self, status: int, content: dict, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def toy_server(fault: str = "") -> Iterator[str]:
    """A server in threads; gives its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.toy = Toy(fault)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
