"""Observations of the paper: bytes and time of the KV cache over length (Figures 2b and 2c),
how much attention few tokens hold (3a), and how long tokens that one query chooses serve the
queries after it (3c)."""

import statistics
from typing import Any

import torch

from minitri import GenerationConfig
from minitri.apps.plan import config_of
from minitri.core.requests import NO_SPECULATION
from minitri.core.roofline import CARDS, Workload, bytes_per_pass
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import COLORS, curves, grid, select, spread

MODEL, CARD = "llama2-7b-128k", 80
"""The paper's model, and the GiB of its A100."""
LENGTHS = [1024 << n for n in range(8)]
STEPS = 32
"""Tokens that are decoded after each text."""
SHORT = 64
"""Tokens of a text whose KV cache takes no time, next to the weights."""
COLUMNS = ("weights, MB", "KV, MB", "KV, % of bytes", "ms a token", "attention, % of time")
NOTES = {
    "measured": f"Attention: what a token takes longer than after {SHORT} tokens.",
    "predicted": "By bytes over bandwidth.",
}
PAPER = PUBLISHED["fig3a"]["recovered"]
SHARE = 4 / 120
SHARES = (0.01, SHARE, 0.1, 0.25)
"""Shares of the text's tokens; the second is the paper's."""
NUM_QUERIES = 16
"""Queries of Figure 3a: the last prompt token's, and those of the tokens after it."""
QUERIES_AT_ONCE = 32
NUM_DENSE = 2
"""First layers, in which the paper sees no sparsity."""


def cells_of_lengths(scale: Scale) -> list[Json]:
    """Every length, after one text here; and the arithmetic for the paper's model."""
    measured = grid(what=["measured"], context=scale.contexts)
    return measured + grid(what=["predicted"], context=LENGTHS)


def measure_lengths(lab: Lab, settings: Json) -> Json:
    """Bytes that a pass of the target reads, and milliseconds: what a token takes more than after a
    short text is attention."""
    context = settings["context"]
    if settings["what"] == "predicted":
        work = Workload(config_of(MODEL), None, num_tokens=context, num_retrieved=0)
        read, card = work.read("target", 0), CARDS[CARD]
        attention = 1e3 * read.kv_bytes / card.bytes_per_second
        parts = {"attention": attention, "rest": 1e3 * read.seconds(card) - attention}
        return {"weights": read.weight_bytes, "kv": read.kv_bytes, "ms": parts}
    engine = lab.engine(context, **lab.scale.stretched)
    generation = GenerationConfig(STEPS, ignore_eos=True)
    prompt = lab.prompt(0, context, engine)
    found = list[float]()
    short = min(SHORT, context // 2)
    for num_tokens in (short, short, context):  # the first one warms up
        engine.release()
        how: Json = {"generation": generation, "speculation": NO_SPECULATION}
        run = engine.generate(prompt[:num_tokens], seed=0, temperature=0, **how)
        list(run)
        found.append(run.stats.ms_per_token or 0.0)
    parts = {"attention": max(0.0, found[2] - found[1]), "rest": found[1]}
    kv = engine.config.kv_values_per_token * engine.model.dtype.itemsize * context
    return {"weights": bytes_per_pass(engine.model), "kv": kv, "ms": parts}


def share_of_bytes(values: Json) -> float:
    """Share of the bytes that are KV cache, in %."""
    return 100 * values["kv"] / float(values["kv"] + values["weights"])


def share_of_time(values: Json) -> float:
    """Share of the time that attention takes, in %."""
    return 100 * values["ms"]["attention"] / float(sum(values["ms"].values()))


def show_lengths(done: list[Done], scale: Scale) -> Shown:  # noqa: ARG001 (part of the protocol)
    tables, parts, ends, series = [], [], list[float](), dict[str, dict[int, float]]()
    for what, where in (("measured", "here"), ("predicted", f"{MODEL} on an A100")):
        found = {it.settings["context"]: it.values for it in select(done, what=what)}
        by_bytes, by_time = (
            {n: share(values) for n, values in found.items()}
            for share in (share_of_bytes, share_of_time)
        )
        rows = [
            [f"{it:,}" for it in (n, round(values["weights"] / 1e6), round(values["kv"] / 1e6))]
            + [f"{by_bytes[n]:.0f}", f"{sum(values['ms'].values()):.1f}", f"{by_time[n]:.0f}"]
            for n, values in found.items()
        ]
        tables.append(Table([f"{where}, {what}: tokens", *COLUMNS], rows, NOTES[what]))
        short, long = min(found), max(found)
        series |= {f"% of bytes, {what}": by_bytes, f"% of time, {what}": by_time}
        parts.append(f"from {by_bytes[short]:.0f}% of the bytes and {by_time[short]:.0f}% of the ")
        parts[-1] += f"time after {short:,} tokens to {by_bytes[long]:.0f}% and "
        parts[-1] += f"{by_time[long]:.0f}% after {long:,} ({what})"
        ends += [by_bytes[long], by_time[long]]
    verdict = f"The KV cache goes {', and '.join(parts)}: it "
    verdict += f"{'becomes' if min(ends) > 50 else 'does not always become'} the larger part."
    axes = {"xscale": "log", "xlabel": "text, tokens", "ylabel": "KV cache, %", "ylim": (0, 100)}
    return Shown(tables, verdict, curves({"": series}, **axes))


def cells(scale: Scale) -> list[Json]:
    """Every text."""
    return grid(text=range(min(scale.num_texts, 10)))


@torch.inference_mode()
def measure_best(lab: Lab, settings: Json) -> Json:
    """Attention that each layer's best tokens hold, by share: means over heads, each with
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
    """Attention to the prompt, by layer and new token, that goes to the tokens that the last
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


def of_texts(done: list[Done]) -> list[list[tuple[float, ...]]]:
    """Recovered attention of every text: by share and layer, or by layer and token."""
    rows = zip(*(it.values["recovered"] for it in done), strict=True)
    return [[*zip(*row, strict=True)] for row in rows]


def show_best(done: list[Done], scale: Scale) -> Shown:
    found = of_texts(done)
    means = [[*map(statistics.mean, layers)] for layers in found]
    rows = [[str(n), *map(spread, texts)] for n, texts in enumerate(zip(*found, strict=True))]
    titles = [f"{share:.1%} of the tokens" for share in SHARES]
    note = f"Attention recovered after {scale.context:,} tokens, median and range over "
    note += f"{len(done)} texts; means over {NUM_QUERIES} queries, by head."
    dense = statistics.mean(means[1][:NUM_DENSE])
    rest, more = (sorted(row[NUM_DENSE:] or row) for row in means[1:3])
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
    layers = [[*map(statistics.mean, tokens)] for tokens in of_texts(done)]
    others = layers[NUM_DENSE:] or layers
    middle = [statistics.median(them) for them in zip(*others, strict=True)]
    starts = [0, *(1 << n for n in range(20) if 1 << n < len(middle))]
    rows, medians = [], []
    for start, end in zip(starts, [*starts[1:], len(middle)], strict=True):
        own = [statistics.mean(layer[start:end]) for layer in layers]
        rest = own[NUM_DENSE:] or own
        medians.append(statistics.median(rest))
        rows.append([f"{start} to {end - 1}" if end > start + 1 else str(start)])
        rows[-1] += [f"{medians[-1]:.2f}", f"{min(rest):.2f} to {max(rest):.2f}"]
        rows[-1] += [", ".join(f"{it:.2f}" for it in own[:NUM_DENSE])]
    columns = ["tokens later", "median layer", "range over layers", "first two layers"]
    note = f"Attention to the {scale.context:,} prompt tokens that the {SHARE:.1%} chosen by the "
    note += f"last of them recover; means over {len(done)} texts; medians from the third layer on."
    verdict = f"What is chosen recovers {medians[0]:.0%} of that token's own attention, "
    verdict += f"{medians[1]:.0%} of the next one's, and {medians[-1]:.0%} after {starts[-1]} to "
    verdict += f"{len(middle) - 1} tokens (median layer): locality "
    verdict += f"{'holds, and' if medians[-1] > 0.5 else 'does not hold here, it'} fades "
    verdict += "slowly." if medians[-1] > 0.8 * medians[1] else "with every token."

    def draw(axes: Any) -> None:
        for number, layer in enumerate(layers):
            color = COLORS[1 if number < NUM_DENSE else 2]
            axes.plot(layer, color=color, alpha=0.35, label="" if number else "first two layers")
        axes.plot(middle, color=COLORS[4], label="median layer")
        axes.set(xlabel="tokens later", ylabel="attention recovered", ylim=(0, 1.02))

    return Shown([Table(columns, rows, note)], verdict, draw)


FIG2B = Item("fig2b", cells_of_lengths, measure_lengths, show_lengths, 2, 4)
FIG3A = Item("fig3a", cells, measure_best, show_best, 1, 12)
FIG3C = Item("fig3c", cells, measure_chosen, show_chosen, 1, 12)
