"""Figure 6b: acceptance by the size of the chunks that are retrieved together."""

from typing import Any

from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

LARGEST = 1024
"""Of the chunk sizes that a `SpeculationConfig` takes."""


def cells(scale: Scale) -> list[Json]:
    """Every text with every size, up to two chunks in the whole budget."""
    largest = min(scale.budget // 2, LARGEST)
    sizes = [1 << n for n in range(largest.bit_length())]
    texts = range(min(scale.num_texts, 10))
    return [{"text": text, "chunk_size": size} for text in texts for size in sizes]


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance with chunks of a size."""
    scale = lab.scale
    continuation = lab.continuation(settings["text"], scale.context)
    speculation = lab.speculation("retrieval", chunk_size=settings["chunk_size"])
    probs_NV = continuation.by_cache(speculation, scale.gamma2)
    return continuation.rate(probs_NV, scale.gamma2)._asdict()


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every size."""
    sizes = distinct(done, "chunk_size")
    rates = {size: [it["mean"] for it in select(done, chunk_size=size)] for size in sizes}
    errors = {size: [it["error"] for it in select(done, chunk_size=size)] for size in sizes}
    rows = [
        [f"{it:,}", f"{scale.budget // it:,}", spread(rates[it], 3), spread(errors[it], 3)]
        for it in sizes
    ]
    columns = ["chunk, tokens", "chunks in the budget", "accepted", "standard error of a text"]
    note = f"Budget of {scale.budget:,} tokens after {scale.context:,}; medians and ranges over "
    note += "texts, T = 0.6, top-p 0.9. All sizes meet the same tokens."
    means = {size: sum(rates[size]) / len(rates[size]) for size in sizes}
    best = max(sizes, key=means.__getitem__)
    smallest, largest = sizes[0], sizes[-1]
    losses = [means[best] - means[it] for it in (smallest, largest)]
    inner = "is best" if best not in (smallest, largest) else "is best, at the edge"
    verdict = f"A chunk of {best:,} tokens {inner} ({means[best]:.3f}); one of {smallest:,} accepts"
    verdict += f" {losses[0]:.3f} less, one of {largest:,} {losses[1]:.3f} less"
    holds = min(losses) > 0.005
    verdict += ", as in the paper." if holds else ": within noise one of the ends is as good."

    def draw(axes: Any) -> None:
        axes.plot(sizes, [means[it] for it in sizes], "o-", color="#56B4E9", label="here")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="chunk size, tokens", ylabel="accepted / tested")

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "fig6b",
    "Figure 6b: acceptance by chunk size",
    "At a budget of 4,096 tokens chunks that are too small overfit single tokens, and chunks that "
    "are too large leave nothing to choose; the best size lies between.",
    cells,
    measure,
    show,
    minutes_here=2,
    minutes_gpu=20,
)
