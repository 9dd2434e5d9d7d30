"""Table 2: speedup and acceptance by temperature; without hierarchy, and without retrieval."""

from typing import Any

from minitri import SpeculationConfig
from tools.paper.baselines.policies import speculation_with
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

PUBLISHED = {
    0.0: (2.31, 0.9234, 1.56, 0.4649),
    0.2: (2.25, 0.9203, 1.54, 0.4452),
    0.4: (2.20, 0.9142, 1.47, 0.4256),
    0.6: (2.19, 0.9137, 1.42, 0.4036),
    0.8: (2.08, 0.8986, 1.34, 0.3131),
    1.0: (2.08, 0.9004, 1.29, 0.2872),
    1.2: (2.02, 0.8902, 1.27, 0.2664),
}
"""By temperature: speedup and acceptance of TriForce, and of the naive policy."""
PUBLISHED_ABLATIONS = {
    "retrieval without hierarchy": (1.80, 0.9126),
    "StreamingLLM with hierarchy": (1.90, 0.8745),
}
ABLATED_AT = 0.6
"""Temperature of the last two rows."""


def cells(scale: Scale) -> list[Json]:
    """Every temperature after every text."""
    return [
        {"text": text, "temperature": temperature}
        for text in range(scale.num_speed_texts)
        for temperature in scale.temperatures
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """All methods in turns after one text."""
    temperature = settings["temperature"]
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways |= {name: lab.speculation(name) for name in ("triforce", "naive")}
    if temperature == ABLATED_AT:
        streaming = speculation_with("streaming", lab.speculation("triforce"))
        ablations = (lab.speculation("retrieval"), streaming)
        ways |= dict(zip(PUBLISHED_ABLATIONS, ablations, strict=True))
    prompt = lab.prompt(settings["text"], lab.scale.context, lab.engine(lab.scale.context))
    return lab.speeds(prompt, ways, temperature=temperature)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every temperature, and the ablations."""
    temperatures = distinct(done, "temperature")
    rows = []
    for T in temperatures:
        values = select(done, temperature=T)
        published = PUBLISHED.get(T, ("-",) * 4)
        row = [f"{T:g}"]
        for number, method in enumerate(("triforce", "naive")):
            row += [_speedup(values, method), _accepted(values, method)]
            row += [f"{published[2 * number]} ({published[2 * number + 1]})"]
        rows.append(row)
    columns = ["T"]
    for method in ("TriForce", "naive"):
        columns += [f"{method}, speedup", "accepted", "paper"]
    note = f"Speedup over autoregressive decoding after {scale.context:,} tokens, "
    note += "median and range over texts; accepted / tested by the target."
    ablated = select(done, temperature=ABLATED_AT)
    others = [
        [name, _speedup(ablated, name), _accepted(ablated, name), f"{speedup} ({rate})"]
        for name, (speedup, rate) in PUBLISHED_ABLATIONS.items()
    ]
    tables = [
        Table(columns, rows, note),
        Table([f"T = {ABLATED_AT}", "speedup", "accepted", "paper"], others),
    ]
    rates = [[_rate(it, "triforce") for it in select(done, temperature=T)] for T in temperatures]
    lowest = min((min(rate) for rate in rates if rate), default=0.0)
    holds = "holds" if lowest > 0.85 else "does not hold"
    verdict = f"That the target accepts about 0.9 at every temperature {holds}: the lowest rate of "
    verdict += f"a text is {lowest:.2f}."

    def draw(axes: Any) -> None:
        for method, color in (("triforce", "#009E73"), ("naive", "#D55E00")):
            means = [_mean(select(done, temperature=T), method) for T in temperatures]
            axes.plot(temperatures, means, "o-", color=color, label=f"{method}, here")
            published = [PUBLISHED[T][0 if method == "triforce" else 2] for T in PUBLISHED]
            axes.plot([*PUBLISHED], published, ":", color=color, label=f"{method}, paper")
        axes.set(xlabel="temperature", ylabel="speedup", ylim=(0, None))

    return Shown(tables, verdict, draw)


def _rate(values: Json, method: str) -> float:
    return float(values[method]["acceptance"].get("target", 0))


def _speedup(values: list[Json], method: str) -> str:
    return spread(it[method]["speedup"]["median"] for it in values)


def _accepted(values: list[Json], method: str) -> str:
    return spread(_rate(it, method) for it in values)


def _mean(values: list[Json], method: str) -> float:
    return sum(it[method]["speedup"]["median"] for it in values) / max(len(values), 1)


ITEM = Item(
    "table2",
    "Table 2: speedup and acceptance by temperature",
    "TriForce is 2.31 to 2.02 times as fast from T = 0 to 1.2, with acceptance of 0.92 to 0.89; a "
    "drafter alone 1.56 to 1.27, with 0.46 to 0.27.",
    cells,
    measure,
    show,
    minutes_here=5,
    minutes_gpu=60,
)
