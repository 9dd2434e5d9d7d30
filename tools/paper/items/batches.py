"""Table 4: batches, measured at lengths that fit, and by arithmetic at the paper's."""

from minitri import GenerationConfig, Request
from tools.paper.costs import PAPER, on_chip, speedup
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.items.speeds import FIRST
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, means, spread

ROWS = PUBLISHED["table4"]["rows"]
BATCHES = {(rows, thousands, budget): own for rows, thousands, budget, _, own, _ in ROWS[::2]}
"""Rows, K tokens in each and budget; TriForce's speedup at T = 0."""
WHOLE = 122_880
"""Tokens that such a batch has at most."""
METHODS = ("triforce", "naive")
WORTH = 1.5
"""A gain that is worth a second model."""
LENGTHS = [1 << n for n in range(8, 18)]
"""Context lengths of the predicted curves."""


def cells(scale: Scale) -> list[Json]:
    """Every batch at every temperature, scaled as the context and the budget are."""
    return [
        {
            "rows": rows,
            "length": 1024 * thousands * scale.context // WHOLE,
            "budget": max(scale.budget * budget // 4096 // 8 * 8, 16),
            "temperature": temperature,
            "paper": speedups,
        }
        for rows, thousands, budget, temperature, *speedups in ROWS
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """Tokens per second of a whole batch by every method in turns, twice."""
    engine = lab.engine(lab.scale.context)
    lab.release()
    sampling = lab.sampling(settings["temperature"])
    generation = GenerationConfig(lab.scale.new_tokens // 2, ignore_eos=True)
    requests = [
        Request(lab.prompt(b, settings["length"], engine), b, sampling, generation)
        for b in range(settings["rows"])
    ]
    budget = settings["budget"]
    ways = FIRST | {name: lab.speculation(name, budget=budget) for name in METHODS}
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
    rows, gains = [], dict[int, list[float]]()
    for it in done:
        where, alone = it.settings, it.values["autoregressive"]
        rows.append([f"{where['rows']} x {where['length']:,}", f"{where['temperature']:g}"])
        for name, paper in zip(METHODS, where["paper"], strict=True):
            own = [a / b for a, b in zip(it.values[name], alone, strict=True)]
            rows[-1] += [spread(own), f"{paper:.2f}"]
            if name == "triforce":
                gains.setdefault(where["length"], []).extend(own)
    note = "Tokens per second over those of autoregressive decoding of the same batch, "
    note += f"{scale.new_tokens // 2} tokens in each row; median and range of two rounds."
    columns = ["rows x tokens", "T", "TriForce", "paper", "naive", "paper"]
    lines = []
    for (num_rows, thousands, budget), own in BATCHES.items():
        gain = predicted(num_rows, 1024 * thousands, budget)
        numbers = [f"{gain:.2f}", f"{own:.2f}", f"{pays_from(num_rows, budget):,}"]
        lines.append([f"{num_rows} x {thousands}K", *numbers])
    heads = ["rows x tokens", "TriForce, predicted", "paper, T = 0"]
    heads.append(f"{WORTH} from, tokens per row")
    more = "7B on an A100 by bytes and FLOPs, with the paper's acceptance at T = 0."
    everything = [gain for them in gains.values() for gain in them]
    verdict = f"TriForce makes {min(everything):.2f} to {max(everything):.2f} times the tokens of "
    verdict += "the batch alone here."
    if min(everything) < 1 and scale.name != "gpu":
        verdict += " On an A100 memory bounds a pass over the paper's batches, so guesses gain; a "
        verdict += "CPU is soon bound by arithmetic, where a guess costs as much as a token."
    expected = {
        f"{num_rows} rows": {length: predicted(num_rows, length, budget) for length in LENGTHS}
        for num_rows, _, budget in BATCHES
    }
    published = {1024 * thousands: own for (_, thousands, _), own in BATCHES.items()}
    points = {"here": {"": means(gains)}, "A100, predicted": expected}
    points["paper, T = 0"] = {"": published}
    axes = {"xscale": "log", "xlabel": "tokens per row", "ylabel": "speedup of the batch"}
    tables = [Table(columns, rows, note), Table(heads, lines, more)]
    return Shown(tables, verdict, curves(points, **axes, ylim=(0, None)))


TABLE4 = Item("table4", cells, measure, show, 4, 30)
