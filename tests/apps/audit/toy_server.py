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


def chain(seed: int, sharpness: float) -> dict[str, dict[str, float]]:
    """By the word before, the distribution of the next; any other context counts as the first."""
    source = random.Random(seed)
    return {
        before: normalized({word: math.exp(sharpness * source.gauss(0, 1)) for word in WORDS})
        for before in ["", *WORDS]
    }


def normalized(weights: dict[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {word: weight / total for word, weight in weights.items()}


TARGET, DRAFTER = chain(1, 1.2), chain(2, 1.2)


def tempered(probs: dict[str, float], temperature: float) -> dict[str, float]:
    if not temperature:
        best = max(probs, key=lambda word: probs[word])
        return {word: float(word == best) for word in probs}
    return normalized({word: prob ** (1 / temperature) for word, prob in probs.items()})


def draw(probs: dict[str, float], source: random.Random) -> str:
    return source.choices(list(probs), list(probs.values()))[0]


class Toy:
    """The server's side of one fault, or of none."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self._numbers = itertools.count()

    def answer(self, body: dict) -> dict:
        temperature = body["temperature"] if body.get("temperature") is not None else 1.0
        words, tops = [""], []
        source = self._source(body.get("seed"))
        while len(words) <= body["max_tokens"]:
            words += self._block(words[-1], temperature, source, body.get("speculation", True))
        words = words[1 : body["max_tokens"] + 1]
        if self.fault == "silent" or (self.fault == "silent if greedy" and not temperature):
            words = words[:1] * (body["max_tokens"] == 1)
        for before in ["", *words][: len(words)]:
            told = TARGET[before]
            if self.fault == "told after temperature":
                told = tempered(told, temperature)
            if self.fault == "told by the drafter" and body.get("speculation", True):
                told = DRAFTER[before]
            logs = {word: math.log(prob) if prob else -99.0 for word, prob in told.items()}
            if self.fault == "zeros":
                logs = dict.fromkeys(logs, 0.0)
            tops.append(logs)
        return self._worded(body, words, tops)

    def _source(self, seed: int | None) -> random.Random:
        number = next(self._numbers)
        if self.fault == "seed" and seed is not None:
            seed += number
        if self.fault == "one random number" and seed is None:
            seed = -1 - number // 2
        if self.fault == "fixed":
            seed = 5
        return random.Random(f"{number}" if seed is None else seed)

    def _block(
        self, before: str, temperature: float, source: random.Random, speculation: bool
    ) -> list[str]:
        """What one round of drafting and verification adds."""
        found: list[str] = []
        for _ in range(NUM_DRAFTED * speculation):
            p, q = (self._probs(it[before], temperature) for it in (TARGET, DRAFTER))
            guess = draw(q, source)
            if source.random() * q[guess] >= p[guess]:
                residual = {word: max(p[word] - q[word], 0.0) for word in p}
                return [*found, draw(p if self.fault == "recovered" else residual, source)]
            found.append(guess)
            before = guess
        return [*found, draw(self._probs(TARGET[before], temperature), source)]

    def _probs(self, probs: dict[str, float], temperature: float) -> dict[str, float]:
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
                kept = sorted(probs.values())[-8]
                probs = normalized({it: prob * (prob >= kept) for it, prob in probs.items()})
        return tempered(probs, temperature)

    def _worded(self, body: dict, words: list[str], tops: list[dict[str, float]]) -> dict:
        """The JSON of an answer."""
        if "messages" in body:
            num = body["top_logprobs"]
            content = [
                {"token": word, "logprob": logs[word], "top_logprobs": entries(best(logs, num))}
                for word, logs in zip(words, tops, strict=True)
            ]
            return {"choices": [{"logprobs": {"content": content}}]}
        logprobs = {
            "tokens": words,
            "token_logprobs": [logs[word] for word, logs in zip(words, tops, strict=True)],
            "top_logprobs": [
                best(logs, body["logprobs"] * (self.fault != "untold" or word != " c"))
                for word, logs in zip(words, tops, strict=True)
            ],
        }
        return {"choices": [{"text": "".join(words), "logprobs": logprobs}]}


def best(logs: dict[str, float], num: int) -> dict[str, float]:
    return dict(sorted(logs.items(), key=lambda it: -it[1])[:num])


def entries(logs: dict[str, float]) -> list[dict]:
    return [{"token": word, "logprob": log} for word, log in logs.items()]


def handler(toy: Toy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "toy"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wanted = "/v1/chat/completions" if toy.fault == "chat" else "/v1/completions"
            if self.path != wanted or body.get("logprobs") == 20 or body.get("top_logprobs") == 20:
                self._send(400, {"error": {"message": "not here"}})
            elif toy.fault == "no switch" and "speculation" in body:
                self._send(400, {"error": {"message": "what is speculation?"}})
            elif not isinstance(body.get("speculation", True), bool):
                self._send(400, {"error": {"message": "speculation is no truth value"}})
            else:
                self._send(200, toy.answer(body))

        def _send(self, status: int, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def toy_server(fault: str = "") -> Iterator[str]:
    """A server in threads; gives its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(Toy(fault))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
