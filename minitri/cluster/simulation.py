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
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minitri.cli.inputs import read_text
from minitri.errors import InputError, explain, shorten
from minitri.fields import between, check_fields, with_fields
from minitri.settings import MAX_ROWS, GenerationConfig

Costs = tuple[Callable[[int], float], Callable[[int], float]]
"""Of a replica, in seconds: a chunk of so many tokens, and a step over so many rows."""
SIZES = GenerationConfig()
EACH = 10
"""Requests for each replica of a larger fleet."""
MOST_GROWTH = 2
"""Of the time to first tokens, from the second quarter of the requests to the last: beyond it the
queue grows."""
MOST_DEATHS = 10
"""For each request: where answers take longer than replicas live, none would end."""


@dataclass(frozen=True)
class Load:
    """What is asked of a fleet, and what its replicas and its router are like."""

    rate: float = between(1.0, 1e-6)  # requests per second, at random times (Poisson)
    prompt: int = between(2000, 2, 10_000_000)  # tokens
    output: int = between(200, 1, 1_000_000)  # tokens
    shared: float = between(0.0, 0.0, 1)  # of a prompt: a document, about which others ask, too
    documents: int = between(20, 1)
    requests: int = between(1000, 1, 20_000)
    rows: int = between(MAX_ROWS, 1, 1024)  # that a replica runs at a time
    mtbf: float = between(1e9, 0.01)  # hours between failures of a replica
    restart: float = between(60.0, 0.0, 86_400)  # seconds until it is back, with nothing read
    router: float = between(1.0, 0.0)  # milliseconds for each request
    label = "in --fleet, "

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(eq=False)
class Arrival:
    """A request, and what becomes of it; times in seconds."""

    at: float
    num_prompt: int
    num_new: int
    document: str = ""
    num_shared: int = 0  # first tokens of the prompt, which are the document's
    num_unread: int = 0
    num_unwritten: int = 0
    num_cached: int = 0
    replica: int = 0
    work: float = 0.0
    first: float = math.inf
    end: float = math.inf

    def num_known(self, new: "Arrival") -> int:
        """First tokens of a new prompt that were read for this one."""
        own = min(self.num_shared, self.num_prompt - 1 - self.num_unread)
        most = min(own, new.num_shared, new.num_prompt - 1)
        return most * (self.document == new.document)


@dataclass
class Replica:
    """An engine."""

    costs: Costs
    held: list[Arrival]  # by place, the last one there, which runs unless it has an end
    clock: float = 0.0
    ahead: float = 0.0  # seconds of work, as the router expects
    busy: float = 0.0
    waiting: list[Arrival] = field(default_factory=list)
    documents: set[str] = field(default_factory=set)  # of those that wait or are held

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
        read, step = self.costs
        writing = [it for it in running if it.first < math.inf]
        if reading := [it for it in running if it.num_unread]:
            row = min(reading, key=lambda it: it.num_unread)
            num = min(row.num_unread, SIZES.shared_chunk if writing else SIZES.prefill_chunk)
            row.num_unread -= num
            self.clock += read(num)
        ready = [it for it in running if it.first == math.inf and not it.num_unread]
        for rows in filter(None, (ready, writing and writing + ready)):
            self.clock += step(len(rows))
            for it in rows:
                it.first = min(it.first, self.clock)
                it.num_unwritten -= 1
                if it.num_unwritten <= 0 and it.end == math.inf:
                    it.end = self.clock
                    self.ahead -= it.work


def simulate(load: Load, asked: list[Arrival], num_replicas: int, costs: Costs) -> dict[str, float]:
    """Answers all that is `asked`; figures of that."""
    read, step = costs
    nothing = [Arrival(0.0, 1, 0, end=0.0)] * load.rows
    replicas = [Replica(costs, [*nothing]) for _ in range(num_replicas)]
    random = np.random.default_rng(0)
    events = [(it.at, number) for number, it in enumerate(asked)]
    death = len(asked)  # the number of an event that is none of these
    between_deaths = 3600 * load.mtbf / num_replicas
    events.append((random.exponential(between_deaths), death))
    heapq.heapify(events)
    routed = 0.0
    num_deaths = 0
    while events:
        now, number = heapq.heappop(events)
        if number != death:
            now = routed = max(now, routed) + load.router / 1e3
        for one in (it for it in replicas if it.clock < now):
            one.advance(now)
        if number != death:
            it = asked[number]
            saved = read(it.num_shared) * (it.num_shared > 0)
            expected = [
                max(one.clock, now) + one.ahead - saved * (it.document in one.documents)
                for one in replicas
            ]
            it.replica = int(np.argmin(expected))
            best = replicas[it.replica]
            it.work = read(it.num_prompt) + it.num_new * step(load.rows) / load.rows
            it.work -= saved * (it.document in best.documents)
            best.ahead += it.work
            best.documents.add(it.document)
            best.waiting.append(it)
        elif num_deaths < MOST_DEATHS * len(asked) and any(it.end > now for it in asked):
            num_deaths += 1
            number = int(random.integers(num_replicas))
            dead = replicas[number]
            replicas[number] = Replica(costs, [*nothing], now + load.restart, busy=dead.busy)
            for it in [*dead.waiting, *dead.held]:
                if it.end > now:
                    it.first = it.end = math.inf
                    heapq.heappush(events, (now, asked.index(it)))
            heapq.heappush(events, (now + random.exponential(between_deaths), death))
    for one in replicas:
        one.advance(math.inf)
    return {"replicas": num_replicas} | figures(replicas, asked, load)


def figures(replicas: list[Replica], asked: list[Arrival], load: Load) -> dict[str, float]:
    """Throughput, seconds, and shares of time and of tokens."""
    seconds = max(it.end for it in asked) - min(it.at for it in asked)
    firsts = [it.first - it.at for it in sorted(asked, key=lambda it: it.at)]
    num = len(firsts) // 4
    return {
        "requests/s": len(asked) / seconds,
        "tokens/s": sum(it.num_new for it in asked) / seconds,
        "first p50": float(np.quantile(firsts, 0.5)),
        "first p95": float(np.quantile(firsts, 0.95)),
        "answer p95": float(np.quantile([it.end - it.at for it in asked], 0.95)),
        "growth": sum(firsts[3 * num : 4 * num]) / sum(firsts[num : 2 * num]) if num else 1.0,
        "busy": sum(it.busy for it in replicas) / len(replicas) / seconds,
        "hits": sum(it.num_cached for it in asked) / sum(it.num_prompt for it in asked),
        "router": len(asked) * load.router / 1e3 / seconds,
    }


def sized(
    load: Load, asked: list[Arrival], costs: Costs, latency: float, num_replicas: int | None
) -> dict[str, Any]:
    """The least number of replicas whose first tokens take at most `latency` seconds (p95), or the
    given number; and larger fleets with as much load for each replica. Raises `InputError`."""
    tried: dict[int, dict[str, float]] = {}

    def is_enough(num: int) -> bool:
        if num not in tried:
            tried[num] = simulate(load, [replace(it) for it in asked], num, costs)
        return tried[num]["first p95"] <= latency and tried[num]["growth"] < MOST_GROWTH

    powers = [1 << n for n in range(11)]
    least = num_replicas or next(filter(is_enough, powers), 0)
    if not least:
        best = min(it["first p95"] for it in tried.values())
        problem = f"latency={latency} is less than the {best:.3g} s that first tokens take (p95)"
        raise InputError(f"{problem}, however many replicas there are; raise it")
    if num_replicas is None:
        least = bisect_left(range(least + 1), True, least // 2 + 1, least, key=is_enough)
    enough = is_enough(least)
    scaled = []
    for num in sorted({least, 10, 100, 1000}):
        counts = {"documents": -(-load.documents * num // least), "requests": EACH * num}
        larger = replace(load, rate=load.rate * num / least, **counts)
        scaled.append(simulate(larger, drawn(larger), num, costs))
    limit = 1e3 * least / (load.rate * max(load.router, 1e-6))
    return {
        "least": least,
        "enough": enough,
        "tried": [tried[num] for num in sorted(tried)],
        "scaled": scaled,
        "router_limit": limit,
    }


def drawn(load: Load) -> list[Arrival]:
    """Requests at random times about random documents."""
    random = np.random.default_rng(1)
    times = np.cumsum(random.exponential(1 / load.rate, load.requests)).tolist()
    documents = map(str, random.integers(load.documents, size=load.requests))
    sizes = load.prompt, load.output
    num_shared = int(load.shared * load.prompt)
    return [Arrival(at, *sizes, it, num_shared) for at, it in zip(times, documents, strict=True)]


def read_load(text: str) -> tuple[Load, list[Arrival]]:
    """Of `NAME=NUMBER,...`, before which a file of requests may stand. Raises `InputError`."""
    file, *pairs = text.split(",")
    with explain(f"--fleet is {shorten(text, 60)}", "give such as rate=2,prompt=8000,output=300"):
        if "=" in file:
            pairs.append(file)
        values = {name: json.loads(value) for name, value in (it.split("=") for it in pairs)}
        [load] = with_fields(values, Load())
    if "=" in file:
        return load, drawn(load)
    found = []
    for number, line in enumerate(read_text(file, "--fleet").splitlines(), 1):
        advice = 'write such as {"at": 0.5, "prompt_tokens": 900, "max_tokens": 200}'
        with explain(f"line {number} of {shorten(file)} is no request", advice):
            it = {"max_tokens": load.output, "prompt": "", **json.loads(line)}
            num = it.get("prompt_tokens", 2 + len(it["prompt"]) // 4)
            replace(load, prompt=num, output=it["max_tokens"])  # checks both
            if not 0 <= it["at"] < math.inf:
                raise ValueError("at must be seconds from the first request on")
            name = str(it.get("document", it["prompt"][:1000] or number))
            found.append(Arrival(it["at"], num, it["max_tokens"], name, int(load.shared * num)))
    started = min((it.at for it in found), default=0.0)
    found = [replace(it, at=it.at - started) for it in found]
    means = np.mean([(it.num_prompt, it.num_new) for it in found], 0).astype(int).tolist()
    counts = {"documents": len({it.document for it in found}), "requests": len(found)}
    rate = len(found) / max(1e-3, *(it.at for it in found))
    return replace(load, rate=rate, prompt=means[0], output=means[1], **counts), found


def measured(step_ms: str) -> Costs:
    """`read` and `step` of milliseconds for a token, a step, a further row, a chunk. Raises
    `InputError`."""
    with explain(f"--step-ms is {shorten(step_ms, 60)}", "give four numbers, as in 0.2:15:0.5:3"):
        token, step, row, chunk = (float(it) / 1e3 for it in step_ms.split(":"))
        if not (min(token, row, chunk) >= 0 < step and step + row + token + chunk < 1e6):
            raise ValueError("they must be positive")
    return lambda num: chunk + num * token, lambda num: step + (num - 1) * row
