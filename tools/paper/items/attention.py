"""Figure 3a: how much attention few tokens hold, layer by layer; 3c: how long tokens that one query
chooses serve the queries after it."""

import statistics
from typing import Any

import torch

from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import COLORS, curves, grid, spread

PAPER = PUBLISHED["fig3a"]["recovered"]
SHARE = 4 / 120
SHARES = (0.01, SHARE, 0.1, 0.25)
"""Of the text's tokens; the second is the paper's."""
NUM_QUERIES = 16
"""Of Figure 3a: the last prompt token's, and those of the tokens after it."""
QUERIES_AT_ONCE = 32
NUM_DENSE = 2
"""First layers, in which the paper sees no sparsity."""


def cells(scale: Scale) -> list[Json]:
    """Every text."""
    return grid(text=range(min(scale.num_texts, 10)))


@torch.inference_mode()
def measure_best(lab: Lab, settings: Json) -> Json:
    """By share, what each layer's best tokens hold of its attention: means over heads, each with
    tokens of its own, and queries."""
    said = lab.continuation(settings["text"], lab.scale.context)
    counts = [max(1, round(share * said.num_prompt)) for share in SHARES]
    found = []
    for layer in range(said.model.config.num_layers):
        best_HQN = said.attention(layer, 0, NUM_QUERIES).topk(max(counts)).values.cumsum(2)
        found.append([float(best_HQN[..., count - 1].mean()) for count in counts])
    return {"recovered": [[*layers] for layers in zip(*found, strict=True)]}


@torch.inference_mode()
def measure_chosen(lab: Lab, settings: Json) -> Json:
    """By layer and new token, what its attention to the prompt gives to the tokens that the last
    prompt token's queries chose, each head its own; the first is that token's."""
    said = lab.continuation(settings["text"], lab.scale.context)
    num_chosen = max(1, round(SHARE * said.num_prompt))
    layers = []
    for layer in range(said.model.config.num_layers):
        chosen_H1C = said.attention(layer, 0, 1).topk(num_chosen).indices
        recovered = list[float]()
        for first in range(0, said.queries_LNHD.shape[1], QUERIES_AT_ONCE):
            attention_HQS = said.attention(layer, first, QUERIES_AT_ONCE)
            places_HQC = chosen_H1C.expand(-1, attention_HQS.shape[1], -1)
            recovered += attention_HQS.gather(2, places_HQC).sum(2).mean(0).tolist()
        layers.append([round(it, 5) for it in recovered])
    return {"recovered": layers}


def means_of_texts(done: list[Done]) -> list[list[float]]:
    """What was recovered, of the mean text: by share and layer, or by layer and token."""
    texts = [it.values["recovered"] for it in done]
    rows = zip(*texts, strict=True)
    return [[statistics.mean(them) for them in zip(*row, strict=True)] for row in rows]


def show_best(done: list[Done], scale: Scale) -> Shown:
    means = means_of_texts(done)
    texts = [it.values["recovered"] for it in done]
    rows = [
        [str(layer), *(spread(text[n][layer] for text in texts) for n in range(len(SHARES)))]
        for layer in range(len(means[0]))
    ]
    titles = [f"{share:.1%} of the tokens" for share in SHARES]
    note = f"Attention recovered after {scale.context:,} tokens, median and range over "
    note += f"{len(done)} texts; means over {NUM_QUERIES} queries, by head."
    dense = statistics.mean(means[1][:NUM_DENSE])
    rest, more = (sorted(row[NUM_DENSE:]) or row for row in means[1:3])
    num_holding = sum(it >= PAPER for it in rest)
    verdict = f"The best {SHARE:.1%} of the tokens recover {dense:.0%} in the first two layers "
    verdict += f"and {statistics.median(rest):.0%} in the median one of the others "
    verdict += f"({rest[0]:.0%} to {rest[-1]:.0%}; {num_holding} of {len(rest)} reach "
    verdict += f"{PAPER:.0%}); {SHARES[2]:.0%} recover {statistics.median(more):.0%}. "
    verdict += f"That share of the text is {round(SHARE * scale.context):,} tokens here."
    here = {title: dict(enumerate(row)) for title, row in zip(titles, means, strict=True)}
    paper = {titles[1]: dict.fromkeys(range(len(rows)), PAPER)}
    axes = {"xlabel": "layer", "ylabel": "attention recovered", "ylim": (0, 1.02)}
    draw = curves({"": here, "paper": paper}, **axes)
    return Shown([Table(["layer", *titles], rows, note)], verdict, draw)


def show_chosen(done: list[Done], scale: Scale) -> Shown:
    layers = means_of_texts(done)
    others = layers[NUM_DENSE:] or layers
    middle = [statistics.median(them) for them in zip(*others, strict=True)]
    ends = [1 << n for n in range(len(middle).bit_length()) if 1 << n < len(middle)]
    rows, medians = [], []
    for start, end in zip([0, *ends], [*ends, len(middle)], strict=True):
        first, rest = (
            [statistics.mean(layer[start:end]) for layer in them]
            for them in (layers[:NUM_DENSE], others)
        )
        medians.append(statistics.median(rest))
        rows.append([f"{start} to {end - 1}" if end > start + 1 else str(start)])
        rows[-1] += [f"{medians[-1]:.2f}", f"{min(rest):.2f} to {max(rest):.2f}"]
        rows[-1] += [", ".join(f"{it:.2f}" for it in first)]
    columns = ["tokens later", "median layer", "range over layers", "first two layers"]
    note = f"Attention to the {scale.context:,} prompt tokens that the {SHARE:.1%} chosen by the "
    note += f"last of them recover; means over {len(done)} texts; from the third layer on."
    verdict = f"What is chosen recovers {medians[0]:.0%} of that token's own attention, "
    verdict += f"{medians[1]:.0%} of the next one's, and {medians[-1]:.0%} after {ends[-1]} to "
    verdict += f"{len(middle) - 1} tokens (median layer): locality "
    verdict += f"{'holds, and' if medians[-1] > 0.5 else 'does not hold here, it'} fades "
    verdict += "slowly." if medians[-1] > 0.8 * medians[1] else "with every token."

    def draw(axes: Any) -> None:
        for number, layer in enumerate(layers):
            label = "first two layers" if number == 0 else ""
            color = COLORS[1 if number < NUM_DENSE else 2]
            axes.plot(layer, color=color, alpha=0.35, label=label)
        axes.plot(middle, color=COLORS[4], label="median layer")
        axes.set(xlabel="tokens later", ylabel="attention recovered", ylim=(0, 1.02))

    return Shown([Table(columns, rows, note)], verdict, draw)


FIG3A = Item.of("fig3a", cells, measure_best, show_best, minutes=(1, 12))
FIG3C = Item.of("fig3c", cells, measure_chosen, show_chosen, minutes=(1, 12))
