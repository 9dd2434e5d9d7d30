"""How many replicas a load needs: a discrete-event simulation, for `minitri plan --fleet`.

A replica works in rounds, as an open run does (`generation.py`): it reads a chunk of one prompt,
starts the rows that are read, and makes a step of those that were further on. A place in its batch
keeps its last prompt, after whose document the next one may begin. The router sends a request where
the least work is ahead, its own included. What a replica had when it died is asked again.

Left out: network, memory, answers that end early, queues that refuse, K and V in a store.
"""

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minitri.cli.inputs import read_text
from minitri.errors import explain, shorten
from minitri.fields import between, check_fields
from minitri.settings import MAX_ROWS, GenerationConfig

SHARED, WHOLE = GenerationConfig().shared_chunk, GenerationConfig().prefill_chunk
"""Tokens of a prompt that a round reads next to rows that are further on, and without such."""


@dataclass(frozen=True)
class Load:
    """What is asked of a fleet, and what its replicas and its router are like."""

    rate: float = between(1.0, 1e-6)  # requests per second, at random times (Poisson)
    prompt: int = between(2000, 2)  # tokens
    output: int = between(200, 1)  # tokens
    shared: float = between(0.0, 0.0, 1)  # of a prompt: a document, with which others begin, too
    documents: int = between(20, 1)
    requests: int = between(1000, 1, 100_000)
    rows: int = between(MAX_ROWS, 1, 1024)  # that a replica runs at a time
    mtbf: float = between(0.0, 0.0)  # hours between failures of a replica; 0: none
    restart: float = between(60.0, 0.0)  # seconds until it is back, with nothing read
    router: float = between(1.0, 0.0)  # milliseconds that it takes for a request
    __post_init__ = check_fields


@dataclass
class Arrival:
    """A request, and what becomes of it; times in seconds."""

    at: float
    num_prompt: int
    num_new: int
    document: str = ""
    num_shared: int = 0  # first tokens of the prompt, which are the document's
    num_unread: int = 0
    num_unwritten: float = 0
    num_cached: int = 0
    replica: int = 0
    work: float = 0.0
    first: float = math.inf
    end: float = math.inf

    def num_known(self, new: "Arrival") -> int:
        """First tokens of a new prompt that were read for this one."""
        most = min(new.num_shared, self.num_shared, self.num_prompt - 1 - self.num_unread)
        return most * (self.document == new.document)


@dataclass(eq=False)
class Replica:
    """An engine; `read(num_tokens)` are the seconds of a chunk, `step(num_rows)` those of a step,
    and the tokens that it adds to each row."""

    read: Callable[[int], float]
    step: Callable[[int], tuple[float, float]]
    held: list[Arrival]  # by place: the last request, which runs unless it has an end
    waiting: list[Arrival] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)  # that the next prompt may begin with
    clock: float = 0.0
    ahead: float = 0.0  # seconds of work, as the router expects
    busy_seconds: float = 0.0

    def work(self, new: Arrival) -> float:
        """Seconds that a request takes here, next to others."""
        num_tokens = new.num_prompt - (new.document in self.documents) * new.num_shared
        seconds, num_new = self.step(len(self.held))
        return num_tokens * self.read(SHARED) / SHARED + new.num_new / num_new * seconds / len(self.held)

    def advance(self, until: float) -> None:
        """Works until then, and to the end of the round in progress."""
        self._admit()
        while self.clock < until and (running := [it for it in self.held if it.end == math.inf]):
            started = self.clock
            self._round(running)
            self.busy_seconds += self.clock - started
            self._admit()
        self.clock = max(self.clock, until)

    def _admit(self) -> None:
        """Gives free places to those that wait, the shortest first."""
        free = [b for b, it in enumerate(self.held) if it.end < math.inf]
        while free and self.waiting:
            new = min(self.waiting, key=lambda it: it.num_prompt)
            self.waiting.remove(new)
            known = [it.num_known(new) for it in self.held]
            new.num_cached = max(known)
            new.num_unread = new.num_prompt - 1 - new.num_cached
            b = max(free, key=lambda b: 2 * known[b] - self.held[b].num_prompt)
            self.held[b] = new
            free.remove(b)
            self.documents = {it.document for it in [*self.held, *self.waiting]}

    def _round(self, running: list[Arrival]) -> None:
        writing = [it for it in running if it.first < math.inf]
        if reading := [it for it in running if it.num_unread]:
            row = min(reading, key=lambda it: it.num_unread)
            num_tokens = min(row.num_unread, SHARED if writing else WHOLE)
            row.num_unread -= num_tokens
            self.clock += self.read(num_tokens)
        ready = [it for it in running if it.first == math.inf and not it.num_unread]
        if ready:
            self.clock += self.step(len(ready))[0]
        for it in ready:
            it.first = self.clock
            it.num_unwritten = it.num_new - 1
        if writing:
            seconds, num_new = self.step(len(writing + ready))
            self.clock += seconds
            for it in writing + ready:
                it.num_unwritten -= num_new
        for it in writing + ready:
            if it.num_unwritten <= 0:
                it.end = self.clock
                self.ahead -= it.work


def simulate(load: Load, asked: list[Arrival], num_replicas: int, *costs: Any) -> dict[str, float]:
    """What becomes of requests at replicas with `costs`, `read` and `step`; all are answered."""
    nothing = Arrival(0.0, 1, 0, end=0.0)
    replicas = [Replica(*costs, [nothing] * load.rows) for _ in range(num_replicas)]
    random = np.random.default_rng(0)
    queue: list[tuple[float, int, Any]] = [(it.at, i, it) for i, it in enumerate(asked)]
    for number, replica in enumerate(replicas if load.mtbf else (), len(asked)):
        queue.append((random.exponential(3600 * load.mtbf), number, replica))
    heapq.heapify(queue)
    routed = 0.0
    while queue:
        now, number, it = heapq.heappop(queue)
        if isinstance(it, Arrival):
            now = routed = max(now, routed) + load.router / 1e3
        for replica in replicas:
            replica.advance(now)
        if isinstance(it, Arrival):
            best = min(replicas, key=lambda one: max(one.clock - now, 0) + one.ahead + one.work(it))
            it.replica = replicas.index(best)
            it.work = best.work(it)
            best.ahead += it.work
            best.documents.add(it.document)
            best.waiting.append(it)
        elif any(one.end == math.inf for one in asked):
            ...
    for replica in replicas:
        replica.advance(math.inf)
    seconds = max(it.end for it in asked) - asked[0].at
    firsts = np.quantile([it.first - it.at for it in asked], [0.5, 0.95])
    return {
        "replicas": num_replicas,
        "requests/s": len(asked) / seconds,
        "tokens/s": sum(it.num_new for it in asked) / seconds,
        "first p50": firsts[0],
        "first p95": firsts[1],
        "answer p95": np.quantile([it.end - it.at for it in asked], 0.95),
        "busy": sum(it.busy_seconds for it in replicas) / num_replicas / seconds,
        "hits": sum(it.num_cached for it in asked) / sum(it.num_prompt for it in asked),
        "router busy": load.router / 1e3 * len(asked) / seconds,
    }


def arrivals_of(load: Load, file: str) -> list[Arrival]:
    """Those of a file of JSON lines, or drawn."""
    if not file:
        rng = np.random.default_rng(0)
        times = np.cumsum(rng.exponential(1 / load.rate, load.requests))
        documents = rng.integers(load.documents, size=load.requests)
        num = round(load.shared * load.prompt)
        pairs = zip(times, documents, strict=True)
        return [Arrival(at, load.prompt, load.output, str(it), num) for at, it in pairs]
    arrivals = []
    for number, line in enumerate(read_text(file, "--fleet").splitlines(), 1):
        with explain(f"line {number} of {shorten(file)} is no request", "give JSON with at, prompt_tokens"):
            it = json.loads(line)
            num = it.get("prompt_tokens") or len(it["prompt"]) // 4
            name = it.get("document", it.get("prompt", "")[:1000])
            arrivals.append(Arrival(float(it["at"]), num, it.get("max_tokens", load.output), name, int(load.shared * num)))
    return arrivals


def given_times(ms: list[float]) -> Any:
    read, step, row = ms
    return lambda num: num * read / 1e3, lambda num: ((step + (num - 1) * row) / 1e3, 1.0)
