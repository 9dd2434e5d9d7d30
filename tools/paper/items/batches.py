"""Table 4: batches, measured at lengths that fit, and by arithmetic at the paper's."""

from typing import Any

from minitri import GenerationConfig, Request, SpeculationConfig
from tools.paper.costs import PAPER, on_chip, speedup
from tools.paper.item import Done, Item, Json, Shown, Table, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Table 4: batches"
CLAIM = (
    "TriForce makes batches of 2, 6 and 10 texts of 56K, 19K and 12K tokens 1.6 to 1.9 times as "
    "fast, the naive policy 1.2 to 1.5 times."
)
PUBLISHED = {
    (2, 56, 1024): {0.0: (1.89, 1.46), 0.6: (1.75, 1.35)},
    (6, 19, 768): {0.0: (1.90, 1.39), 0.6: (1.76, 1.28)},
    (10, 12, 768): {0.0: (1.72, 1.34), 0.6: (1.61, 1.21)},
}
"""By rows, K tokens in each, and budget: TriForce and naive at two temperatures."""
WHOLE = 122_880
"""Tokens that such a batch has at most."""
METHODS = ("triforce", "naive")
WORTH = 1.5
"""A gain that is worth a second model."""
LENGTHS = [1 << n for n in range(8, 18)]
"""Of the predicted curves."""


def cells(scale: Scale) -> list[Json]:
    """Every batch at every temperature, scaled as the context and the budget are."""
    return [
        {
            "rows": rows,
            "length": 1024 * thousands * scale.context // WHOLE,
            "budget": max(scale.budget * budget // 4096 // 8 * 8, 16),
            "temperature": temperature,
            "paper": [*speedups],
        }
        for (rows, thousands, budget), row in PUBLISHED.items()
        for temperature, speedups in row.items()
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """Tokens per second of a whole batch by every method in turns, twice."""
    engine = lab.engine(lab.scale.context)
    lab.release()
    prompts = [lab.prompt(row, settings["length"], engine) for row in range(settings["rows"])]
    sampling = lab.sampling(settings["temperature"])
    generation = GenerationConfig(lab.scale.new_tokens // 2, ignore_eos=True)
    requests = [Request(prompt, b, sampling, generation) for b, prompt in enumerate(prompts)]
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways |= {name: lab.speculation(name, budget=settings["budget"]) for name in METHODS}
    speeds: Json = {name: [] for name in ways}
    for name in (*ways, *reversed(ways)):
        run = engine.stream(requests, batch_size=len(requests), speculation=ways[name])
        run.results()
        speeds[name].append(run.stats.tokens_per_second)
    return speeds


def predicted(rows: int, length: int, budget: int) -> float:
    """TriForce's speedup of a batch of 7B on an A100."""
    return speedup(on_chip(length, min(budget, length), rows), [PAPER])


def pays_from(rows: int, budget: int) -> int:
    """Tokens in each row, a power of 2, from which that is more than `WORTH`."""
    return next(n for n in (1 << n for n in range(8, 24)) if predicted(rows, n, budget) > WORTH)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every batch and temperature, and what arithmetic says of the paper's."""
    rows, found = [], []
    for it in done:
        where = it.settings
        alone = it.values["autoregressive"]
        rows.append([f"{where['rows']} x {where['length']:,}", f"{where['temperature']:g}"])
        for name, paper in zip(METHODS, where["paper"], strict=True):
            gains = [a / b for a, b in zip(it.values[name], alone, strict=True)]
            rows[-1] += [spread(gains), f"{paper:.2f}"]
            found += [(where["length"], gain) for gain in gains if name == "triforce"]
    note = "Tokens per second over those of autoregressive decoding of the same batch, "
    note += f"{scale.new_tokens // 2} tokens in each row; median and range of two rounds."
    lines = [
        [
            f"{rows} x {thousands}K",
            f"{predicted(rows, 1024 * thousands, budget):.2f}",
            f"{paper[0.0][0]:.2f}",
            f"{pays_from(rows, budget):,}",
        ]
        for (rows, thousands, budget), paper in PUBLISHED.items()
    ]
    heads = [
        "rows x tokens",
        "TriForce, predicted",
        "paper, T = 0",
        f"{WORTH} from, tokens per row",
    ]
    more = "7B on an A100 by bytes and FLOPs, with the paper's acceptance at T = 0."
    columns = ["rows x tokens", "T", "TriForce", "paper", "naive", "paper"]
    gains = [gain for _, gain in found]
    verdict = f"TriForce makes {min(gains):.2f} to {max(gains):.2f} times the tokens of the batch "
    verdict += "alone here."
    if min(gains) < 1:
        verdict += " On an A100 memory bounds a pass over the paper's batches, so guesses gain; a "
        verdict += "CPU is soon bound by arithmetic, where a guess costs as much as a token."

    def draw(axes: Any) -> None:
        for rows, _, budget in PUBLISHED:
            ys = [predicted(rows, length, budget) for length in LENGTHS]
            axes.plot(LENGTHS, ys, ":", label=f"{rows} rows, A100, predicted")
        papers = [(1024 * n, paper[0.0][0]) for (_, n, _), paper in PUBLISHED.items()]
        axes.plot(*zip(*papers, strict=True), "s", color="#999999", label="paper, T = 0")
        axes.plot(*zip(*found, strict=True), "o", label="here")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens per row", ylabel="speedup of the batch", ylim=(0, None))

    return Shown([Table(columns, rows, note), Table(heads, lines, more)], verdict, draw)


ITEM = Item("table4", TITLE, CLAIM, cells, measure, show, minutes_here=4, minutes_gpu=30)
