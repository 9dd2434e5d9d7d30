"""Figures 2b and 2c: weights and KV cache, their bytes and their share of the time, over length."""

from minitri import GenerationConfig
from minitri.plan import config_of
from minitri.roofline import CARDS, Workload, bytes_per_pass
from tools.bench.floor import plain_decoding
from tools.paper.item import Done, Item, Json, Shown
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, grid, table

MODEL, CARD = "llama2-7b-128k", 80
"""Of the paper: an A100 with so many GiB."""
LENGTHS = [1024 << n for n in range(8)]
STEPS = 32
"""Tokens that are decoded after each text."""
SHORT = 64
"""Tokens of a text whose KV cache takes no time, next to the weights."""


def cells(scale: Scale) -> list[Json]:
    """Every length, after one text here; and the arithmetic for the paper's model."""
    measured = grid(what=["measured"], context=scale.contexts)
    return measured + grid(what=["predicted"], context=LENGTHS)


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


def share_of_bytes(values: Json) -> float:
    """Of the KV cache, in %."""
    return 100 * values["kv"] / float(values["kv"] + values["weights"])


def share_of_time(values: Json) -> float:
    """Of attention, in %."""
    return 100 * values["ms"]["attention"] / float(sum(values["ms"].values()))


def show(done: list[Done], scale: Scale) -> Shown:
    tables, parts, ends, series = [], [], list[float](), dict[str, dict[int, float]]()
    titles = {
        "measured": f"{scale.model or 'tiny'} here, measured: tokens",
        "predicted": f"{MODEL} on an A100, predicted by the ledger: tokens",
    }
    for what, title in titles.items():
        found = {it.settings["context"]: it.values for it in done if it.settings["what"] == what}
        if not found:
            continue
        columns = {
            title: lambda it: f"{it[0]:,}",
            "weights, MB": lambda it: f"{it[1]['weights'] / 1e6:,.0f}",
            "KV, MB": lambda it: f"{it[1]['kv'] / 1e6:,.0f}",
            "KV, % of bytes": lambda it: f"{share_of_bytes(it[1]):.0f}",
            "ms a token": lambda it: f"{sum(it[1]['ms'].values()):.1f}",
            "attention, % of time": lambda it: f"{share_of_time(it[1]):.0f}",
        }
        tables.append(table(found.items(), columns))
        by_bytes = series[f"% of bytes, {what}"] = {n: share_of_bytes(found[n]) for n in found}
        by_time = series[f"% of time, {what}"] = {n: share_of_time(found[n]) for n in found}
        short, long = min(found), max(found)
        parts.append(f"from {by_bytes[short]:.0f}% of the bytes and {by_time[short]:.0f}% of the ")
        parts[-1] += f"time after {short:,} tokens to {by_bytes[long]:.0f}% and "
        parts[-1] += f"{by_time[long]:.0f}% after {long:,} ({what})"
        ends += [by_bytes[long], by_time[long]]
    verdict = f"The KV cache goes {', and '.join(parts)}: it "
    verdict += f"{'becomes' if min(ends) > 50 else 'does not always become'} the larger part."
    axes = {"xscale": "log", "xlabel": "text, tokens", "ylabel": "KV cache, %", "ylim": (0, 100)}
    return Shown(tables, verdict, curves({"": series}, **axes))


ITEM = Item.of("fig2b", cells, measure, show, minutes=(2, 4))
