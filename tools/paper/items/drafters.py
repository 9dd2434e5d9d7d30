"""Rebuttal: TriForce next to a datastore (REST) and to skipped layers as drafters."""

import statistics
from typing import Any

from minitri import Drafter, Engine, SpeculationConfig
from tools.paper.baselines.datastore import Datastore
from tools.paper.baselines.skipped_layers import SkippedLayers
from tools.paper.find_layers import Scorer, draw_windows, search
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Rebuttal: REST and skipped layers as drafters"
CLAIM = (
    "TriForce is 2.31 times as fast as the target alone, REST 1.47, skipped layers 1.36 (PG-19)."
)
PUBLISHED = {"TriForce": 2.31, "REST": 1.47, "skipped layers": 1.36}
KEPT = 0.68
"""Of the layers, as of the KV cache in the rebuttal."""
NUM_WINDOWS = 4
"""On which the layers are chosen."""


def cells(scale: Scale) -> list[Json]:
    """Every way after every text."""
    texts = range(scale.num_speed_texts)
    return [{"text": text, "drafter": name} for text in texts for name in PUBLISHED]


def measure(lab: Lab, settings: Json) -> Json:
    """The target alone and with a drafter in turns; gammas of the baselines are chosen before every
    step."""
    text, name = settings["text"], settings["drafter"]
    engine = lab.engine(lab.scale.context)
    prompt = lab.prompt(text, lab.scale.context, engine)
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    if name == "TriForce":
        return lab.speeds(prompt, ways | {name: lab.speculation("triforce")})
    make = rest if name == "REST" else skipped_layers
    drafter = make(engine, other_texts(lab, text, engine))
    with Engine(engine.model, engine.tokenizer, drafter=drafter) as own:
        return lab.speeds(prompt, ways | {name: SpeculationConfig("naive")}, engine=own)


def other_texts(lab: Lab, text: int, engine: Engine) -> list[list[int]]:
    """The tokens of all other texts; of a single one what comes after prompt and output."""
    own = lab.texts[text % len(lab.texts)]
    encode = engine.tokenizer.encode
    if others := [encode(it.content) for it in lab.texts if it is not own]:
        return others
    return [encode(own.content)[lab.scale.context + 2 * lab.scale.new_tokens :]]


def rest(engine: Engine, texts: list[list[int]]) -> Drafter:
    """A datastore of these texts."""
    return Datastore.of(texts, engine.tokenizer.num_tokens)


def skipped_layers(engine: Engine, texts: list[list[int]]) -> Drafter:
    """The model without the layers that are missed least in a text."""
    scorer = Scorer(engine.model, draw_windows(texts[0], NUM_WINDOWS), 0.6)
    layers = search(scorer, max(1, round(KEPT * scorer.num_layers)))
    return SkippedLayers(engine.model, layers)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every drafter."""
    rows, means = [], {}
    for name in distinct(done, "drafter"):
        own = [it[name] for it in select(done, drafter=name)]
        speeds = [it["speedup"]["median"] for it in own]
        means[name] = statistics.mean(speeds)
        rates = spread(it["acceptance"].get("target", 0.0) for it in own)
        tokens = spread(it["tokens_per_step"] for it in own)
        rows.append([name, spread(speeds), f"{PUBLISHED[name]:.2f}", rates, tokens])
    columns = ["drafter", "speedup", "paper", "accepted by the target", "tokens per step"]
    note = f"Over autoregressive decoding in turns after {scale.context:,} tokens, T = 0.6, top-p "
    note += "0.9; median and range over texts. REST looks words up in the other texts; skipped "
    note += f"layers leave {KEPT:.0%} of them, chosen on another text, with a window of the latest "
    note += "tokens as their cache."
    best = max(means, key=means.__getitem__)
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    verdict = f"{best} is fastest here, {'as' if best == 'TriForce' else 'not as'} in the "
    verdict += f"rebuttal: {listed}."

    def draw(axes: Any) -> None:
        places = range(len(means))
        published = [PUBLISHED[name] for name in means]
        ours = [*means.values()]
        axes.bar([it - 0.2 for it in places], ours, 0.4, color="#009E73", label="here")
        axes.bar([it + 0.2 for it in places], published, 0.4, color="#999999", label="paper")
        axes.set_xticks([*places], [*means])
        axes.set_ylabel("speedup")

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item("drafters", TITLE, CLAIM, cells, measure, show, minutes_here=4, minutes_gpu=60)
