"""A server of OpenAI's API as its clients see it: texts, token by token, with log-probabilities."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minitri.core.errors import InputError, explain, shorten

KINDS = [(f"/{kind}completions", num_top) for kind in ("", "chat/") for num_top in (20, 5)]
"""Endpoints, and of how many likely tokens log-probabilities are asked for."""
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""What switches filters off, in the words of several servers."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Which another server would get the key by."""

    def redirect_request(self, *_: Any) -> None:
        """Follows none."""


OPENER = urllib.request.build_opener(NoRedirects)


class Place(NamedTuple):
    """A token of a text, and the log-probabilities that are told of it and of the likeliest."""

    token: str
    logprob: float
    top: dict[str, float]


Text = Sequence[Place]
Bursts = Sequence[tuple[str, Sequence[Text]]]  # a prompt, and the answers to it at one time


@dataclass
class Client:
    """Where requests go to, and what every one of them says."""

    url: str
    key: str | None
    kind: tuple[str, int] = KINDS[0]
    fields: dict[str, Any] = field(default_factory=dict)

    def ask(self, prompt: str, num_new: int, **fields: Any) -> Text:
        """The tokens of an answer. Raises `InputError`."""
        endpoint, num_top = self.kind
        body = {"max_tokens": num_new, "top_p": 1.0, "prompt": prompt, "logprobs": num_top}
        if "chat" in endpoint:
            body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]}
            body |= {"logprobs": True, "top_logprobs": num_top}
        answer = self.call(endpoint, body | self.fields | fields)
        with explain(f"{self.url} answers what is not OpenAI's JSON", "audit another server"):
            logprobs = answer["choices"][0]["logprobs"] or {}
            if "content" in logprobs:  # as for chats
                entries = logprobs["content"]
                own = [(it["token"], it["logprob"]) for it in entries]
                tops = [[(it["token"], it["logprob"]) for it in e["top_logprobs"]] for e in entries]
            else:
                own = [*zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]
                tops = [[*it.items()] for it in logprobs["top_logprobs"]]
            best = [sorted(top, key=lambda it: -it[1])[:num_top] for top in tops]
            if not all(log <= 0.01 for pairs in (own, *best) for _, log in pairs):
                raise ValueError("logarithms of probabilities are not above 0")
            if not all(best):
                raise ValueError("at some token it names no likely ones")
            return [Place(*pair, dict(top)) for pair, top in zip(own, best, strict=True)]

    def burst(self, size: int, prompt: str, *asked: Any, **fields: Any) -> tuple[str, list[Text]]:
        """A prompt that is sent as often."""
        with ThreadPoolExecutor(size) as threads:
            return prompt, [*threads.map(lambda _: self.ask(prompt, *asked, **fields), range(size))]

    def takes(self, **fields: Any) -> bool:
        """Whether a request with these fields is answered, with log-probabilities."""
        try:
            return any(place.top for place in self.ask("Once", 1, **fields))
        except InputError:
            return False

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON at a path, after a POST of `body` if there is one."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None if body is None else json.dumps(body).encode()
        with explain(
            f"{self.url}{path} cannot be had",
            "check the URL, the key, and if the server takes 8 requests at a time",
        ):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                return json.load(OPENER.open(request, timeout=600))
            except urllib.error.HTTPError as error:
                said = error.read(500).decode(errors="replace")
                raise ValueError(f"{error.code}, {shorten(said, 100)}") from None


def connect(url: str, key: str | None, model: str | None) -> Client:
    """A client of the server at a URL that has found out what it takes. Raises `InputError`."""
    client = Client(url.rstrip("/").removesuffix("/v1") + "/v1", key)
    with explain(f"{client.url}/models names no model", "give --model"):
        client.fields["model"] = model or client.call("/models")["data"][0]["id"]
    for client.kind in KINDS:
        if client.takes():
            client.fields |= {it: one for it, one in NEUTRAL.items() if client.takes(**{it: one})}
            return client
    client.ask("Once", 1)  # says why
    raise InputError(f"{client.url} tells no log-probabilities; start it so that it does")
