"""How many replicas a load needs: a discrete-event simulation, for `minitri plan --fleet`.

A replica works in rounds, as an open run does (`generation.py`): it reads a chunk of one prompt,
starts the rows that are read, and makes a step of those that were further on. A place in its batch
keeps its last prompt, after whose document the next one may begin. The router sends a request where
least work is ahead, its own included. What a replica had when it died is asked again.
Left out: network, memory, answers that end early, queues that refuse, K and V in a store.
"""

import heapq
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minitri.fields import between, check_fields
from minitri.settings import MAX_ROWS, GenerationConfig


@dataclass(frozen=True)
class Load:
    """What is asked of a fleet, and what its replicas and its router are like."""

    rate: float = between(1.0, 1e-6)  # requests per second, at random times (Poisson)
    prompt: int = between(2000, 2)  # tokens
    output: int = between(200, 1)  # tokens
    shared: float = between(0.0, 0.0, 1)  # of a prompt: a document, about which others ask, too
    documents: int = between(20, 1)
    requests: int = between(1000, 1, 100_000)
    rows: int = between(MAX_ROWS, 1, 1024)  # that a replica runs at a time
    mtbf: float = between(0.0, 0.0)  # hours between failures of a replica; 0: none
    restart: float = between(60.0, 0.0)  # seconds until it is back, with nothing read
    router: float = between(1.0, 0.0)  # milliseconds for each request
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


@dataclass
class Replica:
    """An engine. `read(num_tokens)` are seconds of a chunk; `step(num_rows)` are those of a step,
    and the tokens that it adds to each row."""

    read: Callable[[int], float]
    step: Callable[[int], tuple[float, float]]
    held: list[Arrival]  # by place, the last one there, which runs unless it has an end
    clock: float = 0.0
    ahead: float = 0.0  # seconds of work, as the router expects
    busy: float = 0.0
    waiting: list[Arrival] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)  # of those that wait or are held

    def work(self, new: Arrival) -> float:
        """Seconds for a request next to others."""
        num_tokens = new.num_prompt - new.num_shared * (new.document in self.documents)
        seconds, num_new = self.step(len(self.held))
        return self.read(int(num_tokens)) + new.num_new / num_new * seconds / len(self.held)

    def advance(self, until: float) -> None:
        """Works until then, and to the end of the round."""
        while self._admit() and self.clock < until:
            began = self.clock
            self._round([it for it in self.held if it.end == math.inf])
            self.busy += self.clock - began
        self.clock = max(self.clock, until)

    def _admit(self) -> bool:
        """Gives free places to the shortest that wait; whether there is something to do."""
        free = [b for b, it in enumerate(self.held) if it.end < math.inf]
        while free and self.waiting:
            new = min(self.waiting, key=lambda it: it.num_prompt)
            self.waiting.remove(new)
            known = [it.num_known(new) for it in self.held]
            new.num_cached = max(known)
            new.num_unread = new.num_prompt - 1 - new.num_cached
            new.num_unwritten = new.num_new
            b = max(free, key=lambda b: 2 * known[b] - self.held[b].num_prompt)
            self.held[b] = new
            free.remove(b)
            self.documents = {it.document for it in [*self.held, *self.waiting]}
        return len(free) < len(self.held)

    def _round(self, running: list[Arrival]) -> None:
        writing = [it for it in running if it.first < math.inf]
        if reading := [it for it in running if it.num_unread]:
            row = min(reading, key=lambda it: it.num_unread)
            sizes = GenerationConfig()
            num = min(row.num_unread, sizes.shared_chunk if writing else sizes.prefill_chunk)
            row.num_unread -= num
            self.clock += self.read(num)
        ready = [it for it in running if it.first == math.inf and not it.num_unread]
        for rows in filter(None, (ready, writing and writing + ready)):
            seconds, num_new = self.step(len(rows))
            self.clock += seconds
            for it in rows:
                it.first = min(it.first, self.clock)
                it.num_unwritten -= num_new
                if it.num_unwritten <= 0 and it.end == math.inf:
                    it.end = self.clock
                    self.ahead -= it.work


def simulate(load: Load, asked: list[Arrival], num_replicas: int, *costs: Any) -> dict[str, float]:
    """Answers all that is `asked`; what became of it, in seconds. `costs`: `read` and `step`."""
    nothing = [Arrival(0.0, 1, 0, end=0.0)] * load.rows
    replicas = [Replica(*costs, [*nothing]) for _ in range(num_replicas)]
    random = np.random.default_rng(0)
    events: list[tuple[float, int, Any]] = [(it.at, i, it) for i, it in enumerate(asked)]
    for i in range(num_replicas if load.mtbf else 0):
        events.append((random.exponential(3600 * load.mtbf), len(asked) + i, i))
    heapq.heapify(events)
    routed = 0.0
    while events:
        now, number, it = heapq.heappop(events)
        if number < len(asked):
            now = routed = max(now, routed) + load.router / 1e3
        for replica in replicas:
            replica.advance(now)
        if number < len(asked):
            expected = [max(one.clock - now, 0) + one.ahead + one.work(it) for one in replicas]
            it.replica = int(np.argmin(expected))
            best = replicas[it.replica]
            it.work = best.work(it)
            best.ahead += it.work
            best.documents.add(it.document)
            best.waiting.append(it)
        elif any(one.end == math.inf for one in asked):
            dead = replicas[it]
            replicas[it] = Replica(*costs, [*nothing], now + load.restart, busy=dead.busy)
            for one in [*dead.waiting, *(row for row in dead.held if row.end == math.inf)]:
                one.first = math.inf
                heapq.heappush(events, (now, asked.index(one), one))
            again = now + load.restart + random.exponential(3600 * load.mtbf)
            heapq.heappush(events, (again, number, it))
    for replica in replicas:
        replica.advance(math.inf)
    seconds = max(it.end for it in asked) - min(it.at for it in asked)
    firsts = [it.first - it.at for it in asked]
    return {
        "replicas": num_replicas,
        "requests/s": len(asked) / seconds,
        "tokens/s": sum(it.num_new for it in asked) / seconds,
        "first p50": float(np.quantile(firsts, 0.5)),
        "first p95": float(np.quantile(firsts, 0.95)),
        "answer p95": float(np.quantile([it.end - it.at for it in asked], 0.95)),
        "busy": sum(it.busy for it in replicas) / num_replicas / seconds,
        "hits": sum(it.num_cached for it in asked) / sum(it.num_prompt for it in asked),
        "router": len(asked) * load.router / 1e3 / seconds,
    }


def drawn(load: Load) -> list[Arrival]:
    """Requests at random times about random documents."""
    random = np.random.default_rng(1)
    times = np.cumsum(random.exponential(1 / load.rate, load.requests)).tolist()
    documents = map(str, random.integers(load.documents, size=load.requests))
    num_shared = round(load.shared * load.prompt)
    sizes = load.prompt, load.output
    return [Arrival(at, *sizes, it, num_shared) for at, it in zip(times, documents, strict=True)]


def read_requests(lines: list[str], load: Load) -> list[Arrival]:
    """Requests of JSON lines: at, prompt or prompt_tokens, max_tokens. Raises `InputError`."""
    found = []
    for line in map(json.loads, lines):
        text = line.get("prompt", "")
        num = line.get("prompt_tokens") or 1 + len(text) // 4  # about, of English
        num_new = line.get("max_tokens", load.output)
        document = line.get("document", text[:1000])
        found.append(Arrival(line["at"], num, num_new, document, int(load.shared * num)))
    return found


def measured(step_ms: str):
    chunk, step, row, per_token = 0, 0, 0, 0
    per_token, step, row, chunk = (float(it) / 1e3 for it in step_ms.split(":"))
    return lambda num: num and chunk + num * per_token, lambda num: (step + (num - 1) * row, 1.0)
