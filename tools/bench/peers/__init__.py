"""Other programs on the same weights and prompts: `python -m tools.bench --compare --peer NAME`.

`choice.py` says which there are. `transformers` runs in this process, the others each in their own,
by any Python interpreter that has them. All decode greedily, which favours prompt lookup.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice

from minitri.apps.bench import Run
from minitri.core.requests import Request

StartPeer = Callable[[list[int], int], Iterator[int]]
"""Another program: continues a prompt by some number of tokens, one at a time; the first follows
the prefill. What is loaded for it is loaded before it returns."""


def run_peer(start: StartPeer, request: Request) -> Run:
    """Lets a program go on after a prompt."""
    num_new = request.generation.max_new_tokens
    peer = start([int(token) for token in request.prompt], num_new)
    times = [time.perf_counter()]
    for _ in islice(peer, num_new):
        times.append(time.perf_counter())
    return Run(
        prefill_seconds=times[1] - times[0],
        ms_per_token=1e3 * (times[-1] - times[1]) / (len(times) - 2),
    )
