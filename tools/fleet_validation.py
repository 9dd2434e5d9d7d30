"""Is the simulation of `minitri plan --fleet` right? Three engines with a thread each, against it.

    python -m tools.fleet_validation          # --wall: by the clock on the wall

A tiny random model in three processes at the same time. A load of its own first tells what a token
of a prompt, a chunk, a step and a further row of it cost under this very condition. Then each load
is simulated, and its requests are submitted at the simulated times to the replicas that the
simulation chose. An engine without work keeps its core busy, and a replica's clock is the processor
time of its process: two cores are shared by three of them, and by whatever else runs, so that on
the wall each would be faster while another one is idle, which machines of their own are not.
"""

import itertools
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from minitri.cluster.fleet import Arrival, Load, drawn, measured, simulate
from tools.serve_load import write_tiny

NUM_REPLICAS = 3
SIZES = (4, 256, 688, 4, 2, 64)
"""Of the model: layers, widths, heads."""
LOADS = {
    "documents": Load(
        rate=16.0, prompt=600, output=40, shared=0.7, documents=12, requests=400, router=0.0
    ),
    "long answers": Load(rate=8.0, prompt=300, output=150, requests=200, router=0.0),
    "long prompts": Load(
        rate=10.0, prompt=900, output=30, requests=240, documents=6, shared=0.4, router=0.0
    ),
}
WINDOW = 0.2  # seconds of work, whose tokens, chunks, steps and rows are counted


def share(one: Any) -> None:
    """Where replicas wait for each other before they start."""
    global barrier
    barrier = one


def serve(given: tuple[int, list[Arrival], int, str, bool]) -> tuple[Any, ...]:
    """A replica's work on what is for it: when the first and last tokens of each request came, how
    many tokens of prompts were read, how long it had work, and the counts of windows."""
    import minitri

    replica, asked, num_rows, folder, by_wall = given
    clock = time.monotonic if by_wall else time.process_time
    engine = minitri.load(folder, dtype="float32", device="cpu", draft="suffix")
    engine.complete([5] * 300, max_new_tokens=16, speculation=False, ignore_eos=True)
    room = minitri.GenerationConfig(reserve=2048)
    run = engine.open(batch_size=num_rows, speculation=False, generation=room)
    left = [(n, it, prompt_of(it, n)) for n, it in enumerate(asked) if it.replica == replica]
    numbers, firsts, ends, windows = [], {}, {}, [np.zeros(5)]
    num_chunks = 0
    busy = 0.0
    barrier.wait()
    before = started = clock()
    while left or len(ends) < len(numbers):
        while left and clock() - started >= left[0][1].at:
            number, it, prompt = left.pop(0)
            own = minitri.GenerationConfig(it.num_new, ignore_eos=True)
            run.submit(minitri.Request(prompt, seed=0, generation=own))
            numbers.append(number)
        event = next(run)
        now = clock()
        busy += (now - before) * (not isinstance(event, minitri.Idle))
        before = now
        if isinstance(event, minitri.PrefillProgress):
            num_chunks += 1
            if busy > WINDOW * len(windows):
                steps = sum(run.stats.steps_per_plan.values())
                further = run.stats.num_decoded_tokens - steps
                counts = (run.stats.num_prefilled_tokens, steps + len(firsts), further, num_chunks)
                windows.append(np.array([busy, *counts]))
        elif isinstance(event, minitri.Token):
            firsts.setdefault(numbers[event.row], now - started)
        elif isinstance(event, minitri.End):
            ends[numbers[event.row]] = now - started
    times = [*firsts.items()], [*ends.items()]
    return *times, busy, np.diff(windows, axis=0)


def prompt_of(asked: Arrival, number: int) -> list[int]:
    """Random tokens, of which the first are the document's."""
    own, document = random.Random(number), random.Random(f"document {asked.document}")
    tokens = document.choices(range(3, 90), k=asked.num_shared)
    return tokens + own.choices(range(3, 90), k=asked.num_prompt - asked.num_shared)


def measure(asked: list[Arrival], num_rows: int, *where: Any) -> tuple[dict[str, float], Any]:
    """The figures of `simulate` for real, and the counts of windows."""
    tasks = [(replica, asked, num_rows, *where) for replica in range(NUM_REPLICAS)]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(NUM_REPLICAS, share, (spawn.Barrier(NUM_REPLICAS),)) as pool:
        firsts, ends, busy, windows = zip(*pool.map(serve, tasks, 1), strict=True)
    first, end = ([time for _, time in sorted(itertools.chain(*it))] for it in (firsts, ends))
    return figures(asked, first, end, sum(busy)), np.concatenate(windows)


def step_ms(costs: Any) -> str:
    """What --step-ms takes, of seconds."""
    return ":".join(f"{1e3 * it:.3f}" for it in costs)


def mixed() -> list[Arrival]:
    """Requests of many sizes, by which step times are measured."""
    draw = random.Random(3)
    asked = drawn(Load(rate=14.0, requests=240))
    for number, it in enumerate(asked):
        it.num_prompt = draw.randrange(40, 1000)
        it.num_new = draw.randrange(10, 120)
        it.num_shared = int(it.num_prompt * draw.choice([0, 0.4, 0.7]))
        it.replica = number % NUM_REPLICAS
    return asked


def again(load: Load, asked: list[Arrival], step_ms: str) -> dict[str, float]:
    """The figures of replicas that get the same requests as before at other step times."""
    asked = [Arrival(**vars(it) | {"first": math.inf, "end": math.inf}) for it in asked]
    chosen = [it.replica for it in asked]
    busy = 0.0
    for replica in range(NUM_REPLICAS):
        own = [it for it, number in zip(asked, chosen, strict=True) if number == replica]
        found = simulate(load, own, 1, measured(step_ms))
        busy += found["busy"] * (max(it.end for it in own) - own[0].at)
    return figures(asked, [it.first for it in asked], [it.end for it in asked], busy)


def figures(asked: list[Arrival], first: Any, end: Any, busy: float) -> dict[str, float]:
    """Those of `simulate` that are compared."""
    at = [it.at for it in asked]
    seconds = max(end) - at[0]
    return {
        "requests/s": len(asked) / seconds,
        "first p50": float(np.quantile(np.subtract(first, at), 0.5)),
        "first p95": float(np.quantile(np.subtract(first, at), 0.95)),
        "answer p95": float(np.quantile(np.subtract(end, at), 0.95)),
        "busy": busy / NUM_REPLICAS / seconds,
    }


def main() -> None:
    """Prints what was simulated and what was measured."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder), 4096, SIZES)
        where = folder, "--wall" in sys.argv
        _, windows = measure(mixed(), 8, *where)
        costs, *_ = np.linalg.lstsq(windows[:, 1:], windows[:, 0])
        print(f"{'':13}   measured    before the run        in it: all times by one factor")
        for name, load in LOADS.items():
            asked = drawn(load)
            simulate(load, asked, NUM_REPLICAS, measured(step_ms(costs)))
            found, windows = measure(asked, load.rows, *where)
            factor = windows[:, 0].sum() / (windows[:, 1:] @ costs).sum()
            pairs = [again(load, asked, step_ms(it)) for it in (costs, factor * costs)]
            print(f"{name}: --step-ms {step_ms(costs)}, in it times {factor:.2f}")
            for key, real in found.items():
                row = [f"{it[key]:12.3f} ({it[key] / real - 1:+6.1%})" for it in pairs]
                print(f"  {key:10} {real:9.3f} {row[0]} {row[1]}", flush=True)


if __name__ == "__main__":
    main()
