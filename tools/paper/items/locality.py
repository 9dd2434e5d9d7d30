"""Figure 3c: how long tokens that one query chooses serve the queries after it."""

import statistics
from typing import Any

import torch

from tools.paper.item import Done, Item, Json, Shown, Table, select
from tools.paper.lab import Lab
from tools.paper.scale import Scale

SHARE = 4 / 120
"""Of the text's tokens that are chosen, as in the paper."""
QUERIES_AT_ONCE = 32
NUM_DENSE = 2


def cells(scale: Scale) -> list[Json]:
    """Every text."""
    return [{"text": text} for text in range(min(scale.num_texts, 10))]


@torch.inference_mode()
def measure(lab: Lab, settings: Json) -> Json:
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


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for some distances, of all layers together; a line in the picture for each layer."""
    texts = [it["recovered"] for it in select(done)]
    num_layers, num_tokens = len(texts[0]), len(texts[0][0])
    means = [
        [statistics.mean(text[layer][n] for text in texts) for n in range(num_tokens)]
        for layer in range(num_layers)
    ]
    others = means[NUM_DENSE:] or means
    ends = [2**n for n in range(num_tokens.bit_length()) if 2**n < num_tokens] + [num_tokens]
    rows = []
    medians = []
    for start, end in zip([0, *ends], ends, strict=False):
        by_layer = sorted(statistics.mean(layer[start:end]) for layer in others)
        medians.append(statistics.median(by_layer))
        low, high = by_layer[0], by_layer[-1]
        name = f"{start} to {end - 1}" if end > start + 1 else str(start)
        first = [f"{statistics.mean(layer[start:end]):.2f}" for layer in means[:NUM_DENSE]]
        rows.append([name, f"{medians[-1]:.2f}", f"{low:.2f} to {high:.2f}", ", ".join(first)])
    columns = ["tokens later", "median layer", "range over layers", "first two layers"]
    note = f"Attention to the {scale.context:,} prompt tokens that the {SHARE:.1%} chosen by the "
    note += f"last of them recover; means over {len(texts)} texts; from the third layer on."
    verdict = f"What is chosen recovers {medians[0]:.0%} of that token's own attention, "
    verdict += f"{medians[1]:.0%} of the next one's, and {medians[-1]:.0%} after {ends[-2]} to "
    verdict += f"{num_tokens - 1} tokens (median layer): "
    is_local = medians[-1] > 0.5
    verdict += f"locality {'holds, and' if is_local else 'does not hold here, it'} fades "
    verdict += "slowly." if medians[-1] > 0.8 * medians[1] else "with every token."

    def draw(axes: Any) -> None:
        for number, layer in enumerate(means):
            color = "#D55E00" if number < NUM_DENSE else "#56B4E9"
            axes.plot(layer, color=color, alpha=0.35, linewidth=0.8)
        middle = [statistics.median(column) for column in zip(*others, strict=True)]
        axes.plot(middle, color="#0072B2", label="median layer")
        axes.plot([], [], color="#D55E00", label="first two layers")
        axes.set(xlabel="tokens later", ylabel="attention recovered", ylim=(0, 1.02))

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "fig3c",
    "Figure 3c: attention recovered by tokens chosen once, over generated tokens",
    "The top 4K of 120K tokens by the last prompt token's attention recover most attention of the "
    "256 tokens generated after it in almost all layers; the share decreases slowly.",
    cells,
    measure,
    show,
    minutes_here=1,
    minutes_gpu=12,
)
