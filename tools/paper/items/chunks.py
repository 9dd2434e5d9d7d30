"""Figure 6b: acceptance by the size of the chunks that are retrieved together."""

import statistics
from typing import Any

from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Figure 6b: acceptance by chunk size"
CLAIM = (
    "At a budget of 4,096 tokens chunks that are too small overfit single tokens, and chunks that "
    "are too large leave nothing to choose; the best size lies between."
)
LARGEST = 1024
"""Of the sizes that a `SpeculationConfig` takes."""

TIE = 0.005
"""Acceptance that counts as no difference."""
NOT = {True: "are", False: "are not"}


def cells(scale: Scale) -> list[Json]:
    """Every text with every size, up to two chunks in the whole budget."""
    largest = min(scale.budget // 2, LARGEST)
    sizes = [1 << n for n in range(largest.bit_length())]
    texts = range(min(scale.num_texts, 10))
    return [{"text": text, "chunk_size": size} for text in texts for size in sizes]


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance with chunks of a size."""
    gamma = lab.scale.gamma2
    said = lab.continuation(settings["text"], lab.scale.context)
    speculation = lab.speculation("retrieval", chunk_size=settings["chunk_size"])
    return said.rate(said.by_cache(speculation, gamma), gamma)._asdict()


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every size."""
    sizes = distinct(done, "chunk_size")
    rates = {size: [it["mean"] for it in select(done, chunk_size=size)] for size in sizes}
    rows = [[f"{it:,}", f"{scale.budget // it:,}", spread(rates[it], 3)] for it in sizes]
    note = f"Accepted / tested with a budget of {scale.budget:,} tokens after {scale.context:,}; "
    note += "medians and ranges over texts, T = 0.6, top-p 0.9. All sizes meet the same tokens."
    table = Table(["chunk, tokens", "chunks in the budget", "accepted"], rows, note)
    means = {size: statistics.mean(rates[size]) for size in sizes}
    best = max(sizes, key=means.__getitem__)
    ends = {"small": sizes[0], "large": sizes[-1]}
    worse = {name: means[best] - means[size] > TIE for name, size in ends.items()}
    shown = sorted({*ends.values(), best, 8} & {*sizes})
    listed = ", ".join(f"{means[it]:.3f} by {it}" for it in shown)
    holds = " and ".join(f"too {name} ones {NOT[it]} worse" for name, it in worse.items())
    verdict = f"By the tokens of a chunk {listed} are accepted: {holds} here."

    def draw(axes: Any) -> None:
        axes.plot(sizes, [*means.values()], "o-", color="#56B4E9", label="here")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="chunk size, tokens", ylabel="accepted / tested")

    return Shown([table], verdict, draw)


ITEM = Item("fig6b", TITLE, CLAIM, cells, measure, show, minutes_here=2, minutes_gpu=20)
