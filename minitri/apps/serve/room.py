"""Size of a server: rows of its batch, and tokens of each, that fit the memory it may take."""

from dataclasses import replace

from minitri.core.errors import InputError
from minitri.core.memory import Models, demand_of
from minitri.core.offload.allocation import room_for
from minitri.core.offload.placement import GIB, Demand
from minitri.core.settings import round_up_to_stride
from minitri.core.shape import MemoryShape

SHARE = 0.6
"""Default share of the memory that is free before weights are read."""


def choose_size(
    models: Models, shape: MemoryShape, gib: float | None, *, fewest: int, shortest: int
) -> tuple[int, int, float]:
    """Rows, tokens of each, and GiB with the weights: the size of a shape, or if `gib` (None:
    `SHARE` of the free memory) is less than that takes, first with fewer and then with shorter
    rows. Raises `InputError`, which says what would fit, where `fewest` rows of `shortest` tokens
    do not fit."""
    needs = demand_of(models, shape)
    on_device, on_host = room_for(models.target, needs)
    loaded = {models.target, models.retrieval, models.draft} - {None}
    # Quantized weights are fewer bytes than `Demand` counts, and a copy of them is more.
    uncounted = sum(model.num_bytes for model in loaded if model) - needs.num_weight_bytes
    free = on_device + uncounted
    most = SHARE * free if gib is None else min(gib * GIB, free)

    def sized(rows: int, context: int) -> Demand:
        run = shape.generation.for_run(context)
        return replace(needs, shape=replace(shape, prompt_lengths=(1,) * rows, generation=run))

    def best(fewest: int, shortest: int) -> tuple[int, int, bool]:
        context = shape.generation.reserve
        step = round_up_to_stride(max(1, context // 128))
        choices = [(n, context) for n in range(shape.num_rows, fewest - 1, -1)]
        choices += [(fewest, n) for n in range(context - step, shortest - 1, -step)]
        fitting = (size for size in choices if sized(*size).has_room(most - uncounted, on_host))
        size = next(fitting, None)
        return *(size or choices[-1]), size is not None

    rows, context, fits = best(fewest, shortest)
    on_chip = shape.generation.on_chip
    num_layers = needs.config.num_layers if on_chip is None else on_chip
    taken = (sized(rows, context).on_device(num_layers) + uncounted) / GIB
    if not fits:
        *other, fits = best(1, round_up_to_stride(1))
        raise InputError(
            f"{rows} x {context} tokens of {needs.config.name} take {taken:.3f} GiB with the "
            f"weights, and there are {most / GIB:.3f} to take",
            "batch_size={} with context={} fits".format(*other) * fits,
            "give more memory=",
        )
    return rows, context, taken
