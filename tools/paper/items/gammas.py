"""Rebuttal: speedup by gamma1 and by gamma2."""

from typing import Any

from minitri import SpeculationConfig
from tools.paper.item import Done, Item, Json, Shown, Table, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

PUBLISHED = {
    "gamma1": dict(enumerate((2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83), 1)),
    "gamma2": dict(enumerate((1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20, 2.17, 2.13), 1)),
}
"""Speedups by one gamma, the other being 2 or 6."""
USUAL = {"gamma1": 2, "gamma2": 6}


def ways() -> dict[str, dict[str, int]]:
    """The gammas of all ways, by their names; one is in both columns."""
    pairs = [USUAL | {name: gamma} for name, column in PUBLISHED.items() for gamma in column]
    return {_name(**gammas): gammas for gammas in pairs}


def _name(gamma1: int, gamma2: int) -> str:
    return f"gammas {gamma1} {gamma2}"


def cells(scale: Scale) -> list[Json]:
    """A cell for a text: all ways in turns."""
    return [{"text": text} for text in range(scale.num_speed_texts)]


def measure(lab: Lab, settings: Json) -> Json:
    """The speeds with all gammas after a text."""
    named = {name: lab.speculation("triforce", **gammas) for name, gammas in ways().items()}
    prompt = lab.prompt(settings["text"], lab.scale.context, lab.engine(lab.scale.context))
    return lab.speeds(prompt, {"autoregressive": SpeculationConfig("autoregressive")} | named)


def show(done: list[Done], scale: Scale) -> Shown:
    """A table for each gamma."""
    found = {
        name: [it.values[name]["speedup"]["median"] for it in done]
        for name in (*ways(), "autoregressive")
    }
    note = f"Over autoregressive decoding after {scale.context:,} tokens, T = 0.6, top-p 0.9; "
    note += "medians and ranges over texts."
    tables, best, means = [], {}, {}
    for name, column in PUBLISHED.items():
        speeds = {gamma: found[_name(**USUAL | {name: gamma})] for gamma in column}
        means[name] = {gamma: sum(own) / len(own) for gamma, own in speeds.items()}
        best[name] = max(means[name], key=means[name].__getitem__)
        other = "gamma2 = 6" if name == "gamma1" else "gamma1 = 2"
        rows = [[str(it), spread(speeds[it]), f"{column[it]:.2f}"] for it in column]
        tables.append(Table([f"{name} ({other})", "speedup", "paper"], rows, note))
    verdict = ""
    for name, gamma in best.items():
        verdict += f"{name} {gamma} is fastest here with {means[name][gamma]:.2f} "
        verdict += f"({USUAL[name]} in the paper; here {means[name][USUAL[name]]:.2f}); "
    verdict = verdict.removesuffix("; ") + ": what a guess costs next to a pass decides."

    def draw(axes: Any) -> None:
        for (name, own), color in zip(means.items(), ("#009E73", "#D55E00"), strict=True):
            axes.plot([*own], [*own.values()], "o-", color=color, label=f"{name}, here")
            published = PUBLISHED[name]
            axes.plot([*published], [*published.values()], ":", color=color, label=f"{name}, paper")
        axes.set(xlabel="gamma", ylabel="speedup", ylim=(0, None))

    return Shown(tables, verdict, draw)


ITEM = Item(
    "gammas",
    "Rebuttal: speedup by gamma1 and gamma2",
    "gamma1 = 2 and gamma2 = 6 are fastest on an A100 (2.31); gamma1 = 8 gives 1.83, gamma2 = 1 "
    "1.62 and gamma2 = 10 2.13.",
    cells,
    measure,
    show,
    minutes_here=2,
    minutes_gpu=40,
)
