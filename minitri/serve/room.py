"""How many requests a server runs at a time, and of how many tokens, in the memory it may take."""

import bisect
from dataclasses import replace
from typing import NamedTuple

from minitri.errors import InputError
from minitri.gpu.allocation import room_for
from minitri.gpu.placement import GIB, Demand, MemoryShape
from minitri.memory import Models

SHARE = 0.6
"""Of the memory that is free before weights are read, which a server takes by default."""
LEAST = 64
"""Tokens of a row: fewer are not even what a server warms up with."""


class Size(NamedTuple):
    """Of a run that takes requests."""

    num_rows: int
    context: int
    gib: float
    """All that it takes at most, with weights and what a process needs by itself."""


def choose_size(
    models: Models, shape: MemoryShape, gib: float | None, *, may_drop: bool, may_cut: bool
) -> Size:
    """The most rows of a shape, at least one, that `gib` holds, if it `may_drop` others; where that
    is not enough, what it reserves for each becomes shorter, if it `may_cut` that. None: `SHARE` of
    what is free. Raises `InputError` with what fits."""
    target, config = models.target, models.target.config
    draft = models.draft.config if models.draft is not None else None
    needs = Demand(config, draft, shape, target.dtype.itemsize)
    on_device, on_host = room_for(target, needs)
    loaded = {it: it.num_bytes for it in (target, models.retrieval, models.draft) if it is not None}
    # Quantized weights are fewer bytes than `Demand` counts, and a copy of them is more.
    uncounted = sum(loaded.values()) - needs.num_weight_bytes
    most = SHARE * (on_device + uncounted) if gib is None else gib * GIB

    def sized(num_rows: int, context: int) -> Demand:
        generation = shape.generation.for_run(context)
        lengths = (1,) * num_rows
        return replace(needs, shape=replace(shape, prompt_lengths=lengths, generation=generation))

    def on_chip(*size: int) -> int | None:
        return sized(*size).most_on_chip(most - uncounted, on_host)

    def best(may_drop: bool, may_cut: bool) -> tuple[int, int]:
        rows, context = shape.num_rows, shape.generation.reserve
        if may_drop:
            rows = next((n for n in range(rows, 1, -1) if on_chip(n, context) is not None), 1)
        if may_cut:  # the first of these fit
            contexts = range(min(LEAST, context), context + 1)
            num = bisect.bisect(contexts, 0, key=lambda n: on_chip(rows, n) is None)
            context = contexts[max(0, num - 1)]
        return rows, context

    size = best(may_drop, may_cut)
    if (layers := on_chip(*size)) is None:
        needed = (sized(*size).on_device(config.num_layers) + uncounted) / GIB
        rows, context = best(may_drop=True, may_cut=True)
        fits = on_chip(rows, context) is not None
        raise InputError(
            f"{size[0]} x {size[1]} tokens of {config.name} take {needed:.2f} GiB with the weights "
            f"and memory= is {most / GIB:.2f}",
            *[f"batch_size={rows} with context={context} fits"] * fits,
            "give more memory=",
        )
    num_bytes = sized(*size).on_device(layers) + sized(*size).on_host(layers) + uncounted
    return Size(*size, num_bytes / GIB)
