"""Figure 3a: how much attention few tokens hold, layer by layer."""

import statistics
from typing import Any

import torch

from tools.paper.item import Done, Item, Json, Shown, Table, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

PUBLISHED = 0.96
"""Recovered by 4K tokens of 120K in almost all layers but the first two."""
SHARES = (0.01, 4 / 120, 0.1, 0.25)
"""Of the text's tokens; the second is the paper's."""
NUM_QUERIES = 16
"""The last prompt token's, and those of the tokens after it."""
NUM_DENSE = 2
"""First layers, in which the paper sees no sparsity."""


def cells(scale: Scale) -> list[Json]:
    """Every text."""
    return [{"text": text} for text in range(min(scale.num_texts, 10))]


@torch.inference_mode()
def measure(lab: Lab, settings: Json) -> Json:
    """By share, what each layer's best tokens hold of its attention: means over heads, each with
    tokens of its own, and queries."""
    said = lab.continuation(settings["text"], lab.scale.context)
    counts = [max(1, round(share * said.num_prompt)) for share in SHARES]
    found = []
    for layer in range(said.model.config.num_layers):
        attention_HQS = said.attention(layer, 0, NUM_QUERIES)
        best_HQN = attention_HQS.topk(max(counts)).values.cumsum(2)
        found.append([float(best_HQN[..., count - 1].mean()) for count in counts])
    return {"recovered": [[*layers] for layers in zip(*found, strict=True)]}


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every layer."""
    texts = [it["recovered"] for it in select(done)]
    num_layers = len(texts[0][0])
    means = [
        [statistics.mean(text[number][layer] for text in texts) for layer in range(num_layers)]
        for number in range(len(SHARES))
    ]
    counted = range(len(SHARES))
    rows = [
        [str(layer), *(spread(text[number][layer] for text in texts) for number in counted)]
        for layer in range(num_layers)
    ]
    columns = ["layer", *(f"{share:.1%} of the tokens" for share in SHARES)]
    note = f"Attention recovered after {scale.context:,} tokens, median and range over "
    note += f"{len(texts)} texts; means over {NUM_QUERIES} queries, by head."
    published = means[1]
    dense = statistics.mean(published[:NUM_DENSE])
    rest = sorted(published[NUM_DENSE:]) or published
    num_holding = sum(it >= PUBLISHED for it in rest)
    most = sorted(means[2][NUM_DENSE:]) or means[2]
    verdict = f"The best {SHARES[1]:.1%} of the tokens recover {dense:.0%} in the first two layers "
    verdict += f"and {statistics.median(rest):.0%} in the median one of the others "
    verdict += f"({rest[0]:.0%} to {rest[-1]:.0%}; {num_holding} of {len(rest)} reach "
    verdict += f"{PUBLISHED:.0%}); {SHARES[2]:.0%} recover {statistics.median(most):.0%}. "
    verdict += "The share is the paper's, but not the number: that is "
    verdict += f"{round(SHARES[1] * scale.context):,} tokens here."

    def draw(axes: Any) -> None:
        colors = ("#999999", "#D55E00", "#56B4E9", "#009E73")
        for share, layers, color in zip(SHARES, means, colors, strict=False):
            percents = [100 * it for it in layers]
            axes.plot(percents, "o-", markersize=3, color=color, label=f"{share:.1%} of the tokens")
        axes.axhline(100 * PUBLISHED, color="#D55E00", linestyle=":", label="paper, 3.3%")
        axes.set(xlabel="layer", ylabel="attention recovered, %", ylim=(0, 102))

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "fig3a",
    "Figure 3a: attention recovered by the top tokens, by layer",
    "4K of 120K tokens recover over 96% of the attention in almost all layers but the first two.",
    cells,
    measure,
    show,
    minutes_here=1,
    minutes_gpu=12,
)
