"""Rebuttal: TriForce next to a datastore (REST) and to skipped layers as drafters."""

import random
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from minitri import Drafter, Engine, SpeculationConfig
from tools.paper.baselines.datastore import open_datastore, write_datastore
from tools.paper.baselines.skipped_layers import SkippedLayers
from tools.paper.find_layers import Scorer, draw_windows, search
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

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
    context = lab.scale.context
    engine = lab.engine(context)
    prompt = lab.prompt(settings["text"], context, engine)
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    if settings["drafter"] == "TriForce":
        return lab.speeds(prompt, ways | {"TriForce": lab.speculation("triforce")})
    make = rest if settings["drafter"] == "REST" else skipped_layers
    drafter = make(engine, other_texts(lab, settings["text"], engine))
    engine.release()  # memory for the cache of another engine over the same weights
    with Engine(engine.model, engine.tokenizer, drafter=drafter) as own:
        return lab.speeds(
            prompt, ways | {settings["drafter"]: SpeculationConfig("naive")}, engine=own
        )


def other_texts(lab: Lab, text: int, engine: Engine) -> list[list[int]]:
    """The tokens of all other texts; or of what follows the prompt and its output in the only one,
    as far as there is anything."""
    number = text % len(lab.texts)
    others = [it.content for it in lab.texts if it is not lab.texts[number]]
    if others:
        return [engine.tokenizer.encode(content) for content in others]
    ids = engine.tokenizer.encode(lab.texts[number].content)
    return [ids[lab.scale.context + 2 * lab.scale.new_tokens :]]


def rest(engine: Engine, texts: list[list[int]]) -> Drafter:
    """A datastore of these texts."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store"
        write_datastore(file, texts, engine.tokenizer)
        return open_datastore(file, engine.tokenizer)  # whose mapping outlives the file's name


@torch.inference_mode()
def skipped_layers(engine: Engine, texts: list[list[int]]) -> Drafter:
    """The model without the layers that are missed least in a text."""
    windows = draw_windows(texts[0], NUM_WINDOWS, random.Random(0))
    num_layers = engine.config.num_layers
    args = Namespace(keep=max(1, round(KEPT * num_layers)), swaps=0, seed=0)
    layers = search(Scorer(engine.model, windows, 0.6), num_layers, args)
    return SkippedLayers(engine.model, layers)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every drafter."""
    found = {
        name: [it[name] for it in select(done, drafter=name)] for name in distinct(done, "drafter")
    }
    speeds = {name: [it["speedup"]["median"] for it in own] for name, own in found.items()}
    rows = [
        [
            name,
            spread(speeds[name]),
            f"{PUBLISHED[name]:.2f}",
            spread(it["acceptance"].get("target", 0.0) for it in own),
            spread(it["tokens_per_step"] for it in own),
        ]
        for name, own in found.items()
    ]
    columns = ["drafter", "speedup", "paper", "accepted by the target", "tokens per step"]
    note = f"Over autoregressive decoding in turns after {scale.context:,} tokens, T = 0.6, top-p "
    note += "0.9; median and range over texts. REST looks words up in the other texts; skipped "
    note += f"layers are {KEPT:.0%} of the model's, chosen on another text, with a window of the "
    note += "latest tokens as their cache."
    means = {name: sum(own) / len(own) for name, own in speeds.items()}
    best = max(means, key=means.__getitem__)
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    verdict = f"{best} is fastest here, {'as' if best == 'TriForce' else 'not as'} in the "
    verdict += f"rebuttal: {listed}."

    def draw(axes: Any) -> None:
        places = range(len(means))
        ours = [it - 0.2 for it in places], [*means.values()]
        axes.bar(*ours, 0.4, color="#009E73", label="here")
        published = [PUBLISHED[name] for name in means]
        axes.bar([it + 0.2 for it in places], published, 0.4, color="#999999", label="paper")
        axes.set_xticks([*places], [*means])
        axes.set_ylabel("speedup")

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "drafters",
    "Rebuttal: REST and skipped layers as drafters",
    "On PG-19 TriForce is 2.31 times as fast as the target alone, REST 1.47, skipped layers 1.36.",
    cells,
    measure,
    show,
    minutes_here=3,
    minutes_gpu=60,
)
