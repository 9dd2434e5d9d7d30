"""Table 4: batches, measured at lengths that fit, and as arithmetic at the paper's."""

from typing import Any

from minitri import GenerationConfig, Request, SpeculationConfig
from tools.paper.costs import PAPER, on_chip, speedup
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

PUBLISHED = {
    (2, 56, 1024): {0.0: (1.89, 1.46), 0.6: (1.75, 1.35)},
    (6, 19, 768): {0.0: (1.90, 1.39), 0.6: (1.76, 1.28)},
    (10, 12, 768): {0.0: (1.72, 1.34), 0.6: (1.61, 1.21)},
}
"""By rows, thousands of tokens in each, and budget: TriForce and naive at two temperatures."""
TOTAL = 122_880
"""Tokens of a full batch in the paper, about."""
METHODS = ("triforce", "naive")
LENGTHS = [1 << n for n in range(8, 18)]
"""Of the predicted curves."""


def cells(scale: Scale) -> list[Json]:
    """Every batch at every temperature; the paper's share of the context in each row."""
    share = scale.context / TOTAL
    return [
        {
            "rows": rows,
            "length": round(share * 1024 * thousands),
            "budget": max(8 * round(scale.budget * budget / 4096 / 8), 16),
            "temperature": temperature,
        }
        for (rows, thousands, budget), row in PUBLISHED.items()
        for temperature in row
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """Tokens per second of a whole batch by every method, one after the other, twice."""
    engine = lab.engine(lab.scale.context)
    prompts = [lab.prompt(row, settings["length"], engine) for row in range(settings["rows"])]
    sampling = lab.sampling(settings["temperature"])
    generation = GenerationConfig(lab.scale.new_tokens, ignore_eos=True)
    requests = [Request(prompt, b, sampling, generation) for b, prompt in enumerate(prompts)]
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways |= {name: lab.speculation(name, budget=settings["budget"]) for name in METHODS}
    speeds: Json = {name: [] for name in ways}
    for names in ([*ways], [*ways][::-1]):
        for name in names:
            run = engine.stream(requests, batch_size=len(requests), speculation=ways[name])
            run.results()
            speeds[name].append(run.stats.tokens_per_second)
    return speeds


def pays_from(rows: int, budget: int) -> int:
    """Tokens in each row, a power of 2, from which TriForce gains something on an A100."""
    lengths = (1 << n for n in range(8, 24))
    return next(n for n in lengths if speedup(on_chip(n, min(budget, n), rows), [PAPER]) > 1)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every batch and temperature, and what arithmetic says of the paper's."""
    rows, gains, lines = [], [], []
    for (num_rows, thousands, budget), published in PUBLISHED.items():
        for T in distinct(done, "temperature"):
            for it in (one for one in done if (num_rows, T) == _key(one.settings)):
                found = {name: _gains(it.values, name) for name in METHODS}
                gains += found["triforce"]
                pairs = zip(METHODS, published[T], strict=True)
                columns = [[spread(found[name]), f"{paper:.2f}"] for name, paper in pairs]
                where = f"{num_rows} x {it.settings['length']:,}"
                rows.append([where, f"{T:g}", *columns[0], *columns[1]])
        gain = speedup(on_chip(1024 * thousands, budget, num_rows), [PAPER])
        start = pays_from(num_rows, budget)
        printed = f"{published[0.0][0]:.2f}"
        lines.append([f"{num_rows} x {thousands}K", f"{gain:.2f}", printed, f"{start:,}"])
    columns = ["rows x tokens", "T", "TriForce", "paper", "naive", "paper"]
    note = "Tokens per second of the whole batch over those of autoregressive decoding of the same "
    note += f"batch, {scale.new_tokens} tokens in each row; median and range of two rounds."
    more = "7B on an A100, predicted by bytes and FLOPs with the paper's acceptance at T = 0."
    heads = ["rows x tokens", "TriForce, predicted", "paper, T = 0", "pays from, tokens per row"]
    tables = [Table(columns, rows, note), Table(heads, lines, more)]
    least, most = min(gains, default=0), max(gains, default=0)
    verdict = f"TriForce makes {least:.2f} to {most:.2f} times the tokens of the batch alone here. "
    verdict += "By bytes and FLOPs the paper's batches gain on an A100, where memory bounds a pass;"
    verdict += " on a CPU a pass over more rows is soon bound by arithmetic, so that a guess costs "
    verdict += "as much as a token."

    def draw(axes: Any) -> None:
        for rows, _, budget in PUBLISHED:
            ys = [speedup(on_chip(n, min(budget, n), rows), [PAPER]) for n in LENGTHS]
            axes.plot(LENGTHS, ys, ":", label=f"{rows} rows, A100, predicted")
        papers = [published[0.0][0] for published in PUBLISHED.values()]
        xs = [1024 * thousands for _, thousands, _ in PUBLISHED]
        axes.plot(xs, papers, "s", color="#999999", label="paper, T = 0")
        xs = [it.settings["length"] for it in done]
        axes.plot(xs, [_gains(it.values, "triforce")[0] for it in done], "o", label="here")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens per row", ylabel="speedup of the batch", ylim=(0, None))

    return Shown(tables, verdict, draw)


def _key(settings: Json) -> tuple[int, float]:
    return settings["rows"], settings["temperature"]


def _gains(speeds: Json, name: str) -> list[float]:
    pairs = zip(speeds[name], speeds["autoregressive"], strict=True)
    return [own / alone for own, alone in pairs]


ITEM = Item(
    "table4",
    "Table 4: batches",
    "TriForce makes batches of 2, 6 and 10 texts of 56K, 19K and 12K tokens 1.6 to 1.9 times as "
    "fast, the naive policy 1.2 to 1.5 times.",
    cells,
    measure,
    show,
    minutes_here=4,
    minutes_gpu=30,
)
