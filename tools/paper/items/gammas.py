"""Rebuttal: speedup by gamma1 and by gamma2."""

import statistics
from typing import Any

from minitri import SpeculationConfig
from tools.paper.item import Done, Item, Json, Shown, Table, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Rebuttal: speedup by gamma1 and gamma2"
CLAIM = (
    "gamma1 = 2 and gamma2 = 6 are fastest on an A100 (2.31); gamma1 = 8 gives 1.83, gamma2 = 1 "
    "1.62 and gamma2 = 10 2.13."
)
PUBLISHED = {
    "gamma1": dict(enumerate((2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83), 1)),
    "gamma2": dict(enumerate((1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20, 2.17, 2.13), 1)),
}
"""Speedups by one gamma; the other is usual."""
USUAL = {"gamma1": 2, "gamma2": 6}
COLORS = {"gamma1": "#009E73", "gamma2": "#D55E00"}


def way(name: str, gamma: int) -> tuple[str, dict[str, int]]:
    """Of one gamma: how the way is called, and both gammas; the usual way has two."""
    gammas = USUAL | {name: gamma}
    return str(gammas), gammas


def ways() -> dict[str, dict[str, int]]:
    """The gammas of all ways, each once."""
    return dict(way(name, gamma) for name, column in PUBLISHED.items() for gamma in column)


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
    note = f"Over autoregressive decoding after {scale.context:,} tokens, T = 0.6, top-p 0.9; "
    note += "medians and ranges over texts, all in turns."
    tables, verdicts = [], []
    means = dict[str, dict[int, float]]()
    for name, column in PUBLISHED.items():
        speeds = {
            gamma: [it.values[way(name, gamma)[0]]["speedup"]["median"] for it in done]
            for gamma in column
        }
        rows = [[str(it), spread(speeds[it]), f"{column[it]:.2f}"] for it in column]
        tables.append(Table([name, "speedup", "paper"], rows, note))
        own = means[name] = {gamma: statistics.mean(them) for gamma, them in speeds.items()}
        best, usual = max(own, key=own.__getitem__), USUAL[name]
        verdicts.append(f"{name} = {best} is fastest here ({own[best]:.2f}; {usual}: ")
        verdicts[-1] += f"{own[usual]:.2f})"
    verdict = f"{' and '.join(verdicts)}: what decides is how dear a guess is next to a pass of the"
    verdict += " target, and how often it is accepted."

    def draw(axes: Any) -> None:
        for name, own in means.items():
            published = PUBLISHED[name]
            axes.plot([*own], [*own.values()], "o-", color=COLORS[name], label=f"{name}, here")
            ys = [*published.values()]
            axes.plot([*published], ys, ":", color=COLORS[name], label=f"{name}, paper")
        axes.set(xlabel="gamma", ylabel="speedup", ylim=(0, None))

    return Shown(tables, verdict, draw)


ITEM = Item("gammas", TITLE, CLAIM, cells, measure, show, minutes_here=2, minutes_gpu=40)
