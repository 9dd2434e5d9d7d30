"""Is the simulation of `minitri plan --fleet` right? Three engines with a thread each, against it.

    python -m tools.fleet_validation

A tiny random model in three processes. First all three measure at the same time what a token of a
prompt, a step, and a further row of it cost. Then each load is simulated, and its requests are sent
at the simulated times to the replicas that the simulation chose. An engine without work keeps its
core busy: the three share two cores here, so that each would be faster while another one is idle,
which machines of their own are not.
"""

import json
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from minitri.cluster.fleet import Arrival, Load, arrivals_of, given_times, simulate
from tools.serve_load import write_tiny

NUM_REPLICAS = 3
SIZES = (4, 256, 688, 4, 2, 64)
"""Of the model: layers, widths, heads."""
LOADS = {
    "documents": Load(rate=4.0, prompt=600, output=40, shared=0.7, documents=12, requests=240),
    "long answers": Load(rate=1.6, prompt=300, output=150, requests=100),
    "long prompts": Load(rate=2.0, prompt=900, output=30, requests=120, documents=6, shared=0.4),
}
TIMED = [Arrival(0.0, 600, 64, replica=number % NUM_REPLICAS) for number in range(8 * NUM_REPLICAS)]
"""Requests by which steps are timed."""


def serve(pipe: Connection, folder: str, num_rows: int) -> None:
    """A replica: runs what comes through the pipe; tells of each request when its first and its
    last token came, and at last the statistics."""
    import minitri

    engine = minitri.load(folder, dtype="float32", device="cpu", draft="suffix")
    engine.complete([5] * 300, max_new_tokens=16, speculation=False, ignore_eos=True)
    room = minitri.GenerationConfig(reserve=2048)
    run = engine.open(batch_size=num_rows, speculation=False, generation=room)
    pipe.send("ready")
    keys, firsts = {}, {}
    is_open = True
    while is_open:
        while is_open and pipe.poll():
            if is_open := (asked := pipe.recv()) is not None:
                key, prompt, num_new = asked
                own = minitri.GenerationConfig(num_new, ignore_eos=True)
                keys[run.submit(minitri.Request(prompt, seed=0, generation=own))] = key
        event = next(run)
        if isinstance(event, minitri.Token):
            firsts.setdefault(event.row, time.monotonic())
        elif isinstance(event, minitri.End):
            pipe.send((keys[event.row], firsts[event.row], time.monotonic()))
    pipe.send(run.stats)


def prompt_of(asked: Arrival, number: int) -> list[int]:
    """Random tokens, of which the first are the document's."""
    own, document = random.Random(number), random.Random(f"document {asked.document}")
    num_own = asked.num_prompt - asked.num_shared
    tokens = document.choices(range(3, 90), k=asked.num_shared)
    return tokens + own.choices(range(3, 90), k=num_own)


def measure(asked: list[Arrival], num_rows: int, folder: str) -> tuple[Any, list[Any]]:
    """Seconds (N, 2) from each request to its first and last token, and statistics of replicas."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(NUM_REPLICAS)]
    for _, end in pairs:
        spawn.Process(target=serve, args=(end, folder, num_rows), daemon=True).start()
    pipes = [pipe for pipe, _ in pairs]
    for pipe in pipes:
        pipe.recv()
    prompts = [prompt_of(it, number) for number, it in enumerate(asked)]
    found = np.zeros((len(asked), 2))
    started = time.monotonic()
    num_sent = num_ended = 0
    while num_ended < len(asked):
        while num_sent < len(asked) and time.monotonic() - started >= asked[num_sent].at:
            it = asked[num_sent]
            pipes[it.replica].send((num_sent, prompts[num_sent], it.num_new))
            num_sent += 1
        for pipe in multiprocessing.connection.wait(pipes, 0.001):
            key, *times = pipe.recv()
            found[key] = np.array(times) - started - asked[key].at
            num_ended += 1
    for pipe in pipes:
        pipe.send(None)
    return found, [pipe.recv() for pipe in pipes]


def step_ms(folder: str) -> list[float]:
    """Milliseconds of a token of a prompt, of a step over one row, and of each further row."""
    rows, right = [], []
    for num_rows in (1, 8):
        _, stats = measure(TIMED, num_rows, folder)
        for it in stats:
            num_steps = sum(it.steps_per_plan.values())
            print(num_rows, it.prefill_seconds, it.decode_seconds, num_steps, it.num_decoded_tokens, it.num_prefilled_tokens)
            rows.append([0, num_steps, it.num_decoded_tokens - num_steps])
            right.append(it.decode_seconds)
            rows.append([it.num_prefilled_tokens, len(TIMED) // NUM_REPLICAS, 0])
            right.append(it.prefill_seconds)
    return [1e3 * it for it in np.linalg.lstsq(np.array(rows), np.array(right))[0]]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder), 4096, SIZES)
        times = step_ms(folder)
        print(f"--step-ms {':'.join(f'{it:.3f}' for it in times)}")
        for name, load in LOADS.items():
            asked = arrivals_of(load, "")
            expected = simulate(load, asked, NUM_REPLICAS, *given_times(times))
            found, stats = measure(asked, load.rows, folder)
            ends = found[:, 1] + [it.at for it in asked]
            real = {
                "requests/s": len(asked) / (max(ends) - asked[0].at),
                "first p50": np.quantile(found[:, 0], 0.5),
                "first p95": np.quantile(found[:, 0], 0.95),
                "answer p95": np.quantile(found[:, 1], 0.95),
                "busy": sum(it.prefill_seconds + it.decode_seconds for it in stats) / NUM_REPLICAS / (max(ends) - asked[0].at),
                "hits": 1 - sum(it.num_prefilled_tokens for it in stats) / sum(it.num_prompt for it in asked),
            }
            print(name)
            for key, value in real.items():
                print(f"  {key:12} {expected[key]:8.3f} simulated {value:8.3f} measured {expected[key] / value - 1:+8.1%}", flush=True)


if __name__ == "__main__":
    main()
