"""Size of a server: how many rows of its batch fit into the memory that it may take."""

from dataclasses import replace

from minitri import InputError
from minitri.core.memory import Models, demand_of
from minitri.core.offload.allocation import room_for
from minitri.core.offload.placement import GIB
from minitri.core.shape import MemoryShape

SHARE = 0.6  # of the memory that is free before weights are read, by default


def choose_rows(
    models: Models, shape: MemoryShape, gib: float | None, *, fewest: int
) -> tuple[int, float]:
    """A shape's number of rows, or fewer, that fit into `gib` of memory, with the weights.
    `gib` None: `SHARE` of what is free. Also the GiB taken. Raises `InputError` below `fewest`."""
    needs = demand_of(models, shape)
    on_device, on_host = room_for(models.target, needs)
    loaded = {models.target, models.retrieval, models.draft}
    # Quantized weights are fewer bytes than `Demand` counts, and a copy of them is more.
    uncounted = sum(model.num_bytes for model in loaded if model) - needs.num_weight_bytes
    free = on_device + uncounted
    most = SHARE * free if gib is None else min(gib * GIB, free)
    on_chip = shape.generation.on_chip
    num_layers = needs.config.num_layers if on_chip is None else on_chip
    taken = 0.0
    for num_rows in range(shape.num_rows, fewest - 1, -1):
        sized = replace(needs, shape=replace(shape, prompt_lengths=(1,) * num_rows))
        taken = (sized.on_device(num_layers) + uncounted) / GIB
        if sized.has_room(most - uncounted, on_host):
            return num_rows, taken
    got = f"{fewest} x {shape.generation.reserve} tokens of {needs.config.name} and the weights"
    raise InputError(
        f"{got} take {taken:.3f} GiB, and there are {most / GIB:.3f} to take",
        "lower batch_size=",
        "lower context=",
        "give more memory=",
    )
