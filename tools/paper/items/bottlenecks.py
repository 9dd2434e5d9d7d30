"""Figures 2b and 2c: weights and KV cache, their bytes and their share of the time, over length."""

from typing import Any

from minitri import GenerationConfig
from minitri.plan import config_of
from minitri.roofline import CARDS, Workload, bytes_per_pass
from tools.bench.floor import plain_decoding
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select
from tools.paper.lab import Lab
from tools.paper.scale import Scale

MODEL, CARD = "llama2-7b-128k", 80
"""Of the paper: an A100 with so many GiB."""
LENGTHS = [1024 << n for n in range(8)]
STEPS = 32
"""Tokens that are decoded after each text."""
SHORT = 64
"""Tokens of a text whose KV cache takes no time, next to the weights."""


def cells(scale: Scale) -> list[Json]:
    """Every length, after one text here; and the arithmetic for the paper's model."""
    predicted = [{"what": "predicted", "context": context} for context in LENGTHS]
    return [*({"what": "measured", "context": it} for it in scale.contexts), *predicted]


def measure(lab: Lab, settings: Json) -> Json:
    """Bytes that a pass of the target reads, and milliseconds: what a token takes more than after a
    short text is attention."""
    context = settings["context"]
    if settings["what"] == "predicted":
        work = Workload(config_of(MODEL), None, num_tokens=context, num_retrieved=0)
        read, card = work.read("target", 0), CARDS[CARD]
        attention = 1e3 * read.kv_bytes / card.kv_bytes_per_second
        parts = {"attention": attention, "rest": 1e3 * read.seconds(card) - attention}
        return {"weights": read.weight_bytes, "kv": read.kv_bytes, "ms": parts}
    options = {"rope_scaling": lab.scale.rope_scaling} if lab.scale.rope_scaling else {}
    engine = lab.engine(context, **options)
    generation = GenerationConfig(STEPS, ignore_eos=True)
    prompt = lab.prompt(0, context, engine)
    found = list[float]()
    short = min(SHORT, context // 2)
    for num_tokens in (short, short, context):  # the first one warms up
        run = plain_decoding(engine, prompt[:num_tokens], generation)
        list(run)
        found.append(run.stats.ms_per_token or 0.0)
    parts = {"attention": max(0.0, found[2] - found[1]), "rest": found[1]}
    kv = engine.config.kv_values_per_token * engine.model.dtype.itemsize * context
    return {"weights": bytes_per_pass(engine.model), "kv": kv, "ms": parts}


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every length, for both models."""
    tables = []
    shares: dict[str, list[tuple[int, float, float]]] = {}
    titles = {
        "measured": f"{scale.model or 'tiny'} here, measured",
        "predicted": f"{MODEL} on an A100, predicted by the ledger",
    }
    for what, title in titles.items():
        rows = []
        shares[what] = []
        for context in distinct([it for it in done if it.settings["what"] == what], "context"):
            [values] = select(done, what=what, context=context)
            by_bytes = values["kv"] / (values["kv"] + values["weights"])
            total = sum(values["ms"].values())
            by_time = values["ms"]["attention"] / total
            shares[what].append((context, by_bytes, by_time))
            sizes = [f"{values[name] / 1e6:,.0f}" for name in ("weights", "kv")]
            percents = [f"{100 * share:.0f}" for share in (by_bytes, by_time)]
            rows.append([f"{context:,}", *sizes, percents[0], f"{total:.1f}", percents[1]])
        columns = [f"{title}: tokens", "weights, MB", "KV, MB", "KV, % of bytes"]
        tables.append(Table([*columns, "ms a token", "attention, % of time"], rows))
    parts = [
        f"from {100 * it[0][1]:.0f}% of the bytes and {100 * it[0][2]:.0f}% of the time after "
        f"{it[0][0]:,} tokens to {100 * it[-1][1]:.0f}% and {100 * it[-1][2]:.0f}% after "
        f"{it[-1][0]:,} ({what})"
        for what, it in shares.items()
        if it
    ]
    holds = all(it[-1][number] > 0.5 for it in shares.values() if it for number in (1, 2))
    verdict = f"The KV cache goes {', and '.join(parts)}: it "
    verdict += f"{'becomes' if holds else 'does not always become'} the larger part."

    def draw(axes: Any) -> None:
        for (what, found), color in zip(shares.items(), ("#009E73", "#999999"), strict=True):
            for number, name, line in ((1, "bytes", "o-"), (2, "time", "s--")):
                percents = [100 * it[number] for it in found]
                label = f"KV, % of {name}, {what}"
                axes.plot([it[0] for it in found], percents, line, color=color, label=label)
        axes.set(xscale="log", xlabel="text, tokens", ylabel="%", ylim=(0, 100))

    return Shown(tables, verdict, draw)


ITEM = Item(
    "fig2b",
    "Figures 2b and 2c: weights and KV cache by length of the text",
    "Compared with model weights, the KV cache gradually becomes the other bottleneck, and takes "
    "most of the memory, as the text gets longer.",
    cells,
    measure,
    show,
    minutes_here=2,
    minutes_gpu=4,
)
