"""Client of an OpenAI-compatible server: texts, token by token, with their log-probabilities."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from minitri.apps.cli.report import Json
from minitri.core.errors import InputError, explain, shorten

KINDS = [(f"/{kind}completions", num_top) for kind in ("", "chat/") for num_top in (20, 5)]
"""Endpoints, each with the number of top log-probabilities to request."""
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""Fields that switch filters off, in the spelling of several servers; left out if refused."""
NUM_NEW = 32  # tokens of an answer
BURST = 8  # equal requests sent at the same time


class Place(NamedTuple):
    """A token of a text with the log-probabilities reported for it and for the likeliest tokens."""

    token: str
    logprob: float
    top: dict[str, float]


Text = Sequence[Place]
Bursts = Sequence[Sequence[Text]]
"""Concurrent answers to each of several prompts."""


@dataclass
class Client:
    """Client of one model on an OpenAI-compatible server; `fields` go into every request."""

    url: str
    http: Any  # httpx.Client
    fields: Json
    endpoint: str = ""
    num_top: int = 0

    def ask(self, prompt: str, **fields: Any) -> Text:
        """Asks for an answer to a prompt; returns its tokens. Raises `InputError`."""
        body: Json = {"prompt": prompt, "logprobs": self.num_top}
        if "chat" in self.endpoint:
            message = {"role": "user", "content": prompt}
            body = {"messages": [message], "logprobs": True, "top_logprobs": self.num_top}
        body |= {"max_tokens": NUM_NEW, "top_p": 1.0} | self.fields | fields
        answer = self.call(self.endpoint, body)
        with explain(f"{self.url} answers what is not OpenAI's JSON", "audit another server"):
            return read_places(answer["choices"][0]["logprobs"] or {}, self.num_top)

    def burst(self, prompt: str, **fields: Any) -> list[Text]:
        """Sends a prompt `BURST` times at once; returns the answers."""
        with ThreadPoolExecutor(BURST) as threads:
            return [*threads.map(lambda _: self.ask(prompt, **fields), range(BURST))]

    def has_answer(self) -> bool:
        """Whether the server answers a request with log-probabilities."""
        try:
            return len(self.ask("Once", max_tokens=1)) > 0
        except InputError:
            return False

    def call(self, path: str, body: Json | None = None) -> Any:
        """Returns the JSON at a path, by POST if there is a `body`. Raises `InputError`."""
        advice = "check the URL, the key, proxies, and if it takes 8 requests at a time"
        with explain(f"{self.url}{path} cannot be had", advice):
            answer = self.http.request("POST" if body else "GET", self.url + path, json=body)
            if not answer.is_success:
                raise ValueError(f"{answer.status_code}, {shorten(answer.text, 100)}")
            return answer.json()


def read_places(logprobs: Json, num_top: int) -> Text:
    """The tokens in the `logprobs` of an answer. Raises `ValueError` and others for bad JSON."""
    if "content" in logprobs:  # as for chats
        entries = logprobs["content"]
        pairs, *tops = [
            [(entry["token"], entry["logprob"]) for entry in given]
            for given in (entries, *(entry["top_logprobs"] for entry in entries))
        ]
    else:
        pairs = [*zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]
        tops = [top.items() for top in logprobs["top_logprobs"]]
    best = [sorted(top, key=lambda pair: -pair[1])[:num_top] for top in tops]
    if not all(log <= 0.01 for entries in (pairs, *best) for _, log in entries):
        raise ValueError("logarithms of probabilities are not above 0")
    if not all(best):
        raise ValueError("at some token it names no likely ones")
    return [Place(*pair, dict(top)) for pair, top in zip(pairs, best, strict=True)]


def connect(url: str, key: str | None, model: str | None) -> Client:
    """Finds out which endpoint and fields a server takes. Raises `InputError`."""
    import httpx  # with 100 ms of imports, which --help does not need

    headers = {b"Authorization": os.fsencode(f"Bearer {key}")} if key else {}  # for this host alone
    with explain(f"{url} cannot be asked", "check http_proxy, https_proxy and all_proxy"):
        is_far = urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1")  # by a proxy
        http = httpx.Client(headers=headers, timeout=600, trust_env=is_far, follow_redirects=True)
    client = Client(url.rstrip("/").removesuffix("/v1") + "/v1", http, {})
    with explain(f"{client.url}/models names no model", "give --model"):
        model = model or client.call("/models")["data"][0]["id"]
    for client.endpoint, client.num_top in KINDS:
        client.fields = {"model": model}
        if client.has_answer():
            for name, value in NEUTRAL.items():
                client.fields[name] = value
                if not client.has_answer():
                    del client.fields[name]
            return client
    client.ask("Once")  # says why
    raise InputError(f"{client.url} reports no log-probabilities; start it so that it does")
