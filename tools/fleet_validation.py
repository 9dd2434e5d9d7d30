"""Is the simulation of `minitri plan --fleet` right? Three engines with a thread each, against it.

    python -m tools.fleet_validation

A tiny random model in three processes at the same time. A mixed load tells what a token of a
prompt, a step, a further row and a chunk cost under this condition. Then each load is simulated,
and its requests come at the simulated times to the replicas that the simulation chose. A replica's
clock is the processor time of its process, which computes or polls without a pause: on the wall,
where three share two cores with all else, each would be faster while another has nothing to do.
"""

import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from minitri.cluster.simulation import Arrival, Costs, Load, drawn, figures, measured, simulate
from tools.serve_load import write_tiny

SIZES = {"num_layers": 4, "hidden_size": 256, "intermediate_size": 688}
SIZES |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
MIXED = Load(rate=14.0, requests=240, router=0.0)
LOADS = {
    "documents": replace(MIXED, rate=16.0, prompt=600, output=40, shared=0.7, documents=12),
    "long answers": replace(MIXED, rate=8.0, prompt=300, output=150, requests=200),
    "long prompts": replace(MIXED, rate=10.0, prompt=900, output=30, documents=6, shared=0.4),
}
WINDOW = 0.2  # seconds of work in which tokens, steps, further rows and chunks are counted


def serve(given: tuple[list[Arrival], str, Any]) -> tuple[Any, ...]:
    """A replica: first and last times of requests, seconds of work, and counts (windows, 5)."""
    import minitri

    asked, folder, started_all = given
    engine = minitri.load(folder, dtype="float32", device="cpu", draft="suffix")
    engine.complete([5] * 300, max_new_tokens=16, speculation=False, ignore_eos=True)
    room = minitri.GenerationConfig(reserve=2048)
    run = engine.open(speculation=False, generation=room)
    prompts = [prompt_of(it, random.Random()) for it in asked]
    windows = [np.zeros(5)]
    num_sent = num_ended = num_started = num_chunks = 0
    busy = 0.0
    started_all.wait()
    before = started = time.process_time()
    while num_ended < len(asked):
        while num_sent < len(asked) and before - started >= asked[num_sent].at:
            own = minitri.GenerationConfig(asked[num_sent].num_new, ignore_eos=True)
            run.submit(minitri.Request(prompts[num_sent], seed=0, generation=own))
            num_sent += 1
        event = next(run)
        now = time.process_time()
        busy += (now - before) * (not isinstance(event, minitri.Idle))
        before = now
        if isinstance(event, minitri.PrefillProgress):
            num_chunks += 1
            if busy > WINDOW * len(windows):
                stats = run.stats
                steps = sum(stats.steps_per_plan.values())
                counts = (steps + num_started, stats.num_decoded_tokens - steps, num_chunks)
                windows.append(np.array([busy, stats.num_prefilled_tokens, *counts]))
        elif isinstance(event, minitri.Token) and asked[event.row].first > now:
            asked[event.row].first = now - started
            num_started += 1
        elif isinstance(event, minitri.End):
            asked[event.row].end = now - started
            asked[event.row].num_cached = event.row_stats.num_cached_tokens
            num_ended += 1
    return asked, busy, np.diff(windows, axis=0)


def prompt_of(asked: Arrival, own: random.Random) -> list[int]:
    """Random tokens, of which the first are the document's."""
    tokens = random.Random(asked.document).choices(range(3, 90), k=asked.num_shared)
    return tokens + own.choices(range(3, 90), k=asked.num_prompt - asked.num_shared)


def measure(groups: list[list[Arrival]], folder: str) -> tuple[dict[str, float], Any]:
    """The figures of three replicas, for real, and the counts of all windows."""
    with multiprocessing.Manager() as manager:
        barrier = manager.Barrier(3)
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            found = pool.map(serve, [(group, folder, barrier) for group in groups], 1)
    answered, busy, windows = zip(*found, strict=True)
    replicas: Any = [SimpleNamespace(busy=it) for it in busy]
    return figures(replicas, [it for group in answered for it in group], MIXED), np.concatenate(
        windows
    )


def fresh(asked: list[Arrival], replica: int) -> list[Arrival]:
    """Requests of a replica, before anything became of them."""
    own = [it for it in asked if it.replica == replica]
    sizes = ("at", "num_prompt", "num_new", "document", "num_shared")
    return [Arrival(*(getattr(it, name) for name in sizes)) for it in own]


def in_replicas(costs: Any) -> Costs:
    """What was fitted, of which nothing costs less than nothing."""
    return measured(":".join(f"{1e3 * max(it, 0):.3f}" for it in costs))


def simulated(groups: list[list[Arrival]], costs: Any) -> dict[str, float]:
    """The figures of replicas that get these requests."""
    replicas: Any = []
    for group in groups:
        busy = simulate(MIXED, group, 1, in_replicas(costs))["busy"]
        seconds = max(it.end for it in group) - group[0].at
        replicas.append(SimpleNamespace(busy=busy * seconds))
    return figures(replicas, [it for group in groups for it in group], MIXED)


def main() -> None:
    """Prints what was measured and what was simulated."""
    os.environ["OMP_NUM_THREADS"] = "1"
    draw = random.Random(3)
    mixed = [replace(it, replica=number % 3) for number, it in enumerate(drawn(MIXED))]
    for it in mixed:
        it.num_prompt = draw.randrange(40, 1000)
        it.num_new = draw.randrange(10, 120)
        it.num_shared = int(it.num_prompt * draw.choice([0, 0.4, 0.7]))
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder), 4096, **SIZES)
        _, windows = measure([fresh(mixed, replica) for replica in range(3)], folder)
        costs, *_ = np.linalg.lstsq(windows[:, 1:], windows[:, 0])
        print("ms:", 1e3 * costs)
        for name, load in LOADS.items():
            simulate(load, asked := drawn(load), 3, in_replicas(costs))
            real, windows = measure([fresh(asked, replica) for replica in range(3)], folder)
            factor = windows[:, 0].sum() / (windows[:, 1:] @ costs).sum()
            print(
                f"{name}: measured, simulated, and with step times x {factor:.2f}, as in this run"
            )
            for key in ("requests/s", "first p50", "first p95", "answer p95", "busy", "hits"):
                row = f"  {key:10} {real[key]:9.3f}"
                for times in (costs, factor * costs):
                    value = simulated([fresh(asked, replica) for replica in range(3)], times)[key]
                    row += f"{value:12.3f} ({value - real[key]:+.3f})"
                print(row, flush=True)


if __name__ == "__main__":
    main()
