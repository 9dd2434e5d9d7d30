"""The shapes that items share: grids of cells, numbers by a setting, tables, curves and bars."""

import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tools.paper.item import Done, Draw, Json, Table
from tools.paper.scale import Scale

Points = Mapping[Any, float]
"""Points of a curve: y by x; of bars: heights by name."""
Columns = dict[str, Callable[[Any], str]]
"""Columns of a table: a function of a row, by heading."""
COLORS = ("#009E73", "#D55E00", "#56B4E9", "#999999", "#0072B2", "#E69F00", "#CC79A7")
STYLES = ("o-", "x:", "s--")
SPEEDUP = {"ylabel": "speedup", "ylim": (0, None)}
"""Settings of axes."""


def grid(**choices: Iterable[Any]) -> list[Json]:
    """Cells of all combinations of settings, the last of which changes from each to the next."""
    combinations = itertools.product(*choices.values())
    return [dict(zip(choices, them, strict=True)) for them in combinations]


def select(done: Iterable[Done], **settings: Any) -> list[Done]:
    """Cells with these settings."""
    return [cell for cell in done if settings.items() <= cell.settings.items()]


def grouped(done: Iterable[Done], name: str, *path: str) -> dict[Any, list[Any]]:
    """Values at a path of keys of each cell that has a setting, grouped by that setting."""
    groups = dict[Any, list[Any]]()
    for cell in done:
        if name in cell.settings:
            value: Any = cell.values
            for key in path:
                value = value[key]
            groups.setdefault(cell.settings[name], []).append(value)
    return groups


def means(groups: Mapping[Any, Iterable[float]]) -> dict[Any, float]:
    """The mean of every group."""
    return {name: statistics.mean(numbers) for name, numbers in groups.items()}


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Median and range; one number alone."""
    numbers = sorted(values)
    middle, *ends = (
        f"{it:.{digits}f}" for it in (statistics.median(numbers), numbers[0], numbers[-1])
    )
    return f"{middle} ({' to '.join(ends)})" if len(numbers) > 1 else middle


def table(rows: Iterable[Any], columns: Columns, note: str = "") -> Table:
    """A line for each of the rows: what every column makes of it."""
    lines = [[column(row) for column in columns.values()] for row in rows]
    return Table([*columns], lines, note)


def spreads(groups: Mapping[str, Mapping[Any, Iterable[float]]], digits: int = 2) -> Columns:
    """Columns of a table, where each row is a key of the groups of numbers."""

    def column(own: Mapping[Any, Iterable[float]]) -> Callable[[Any], str]:
        return lambda it: spread(own[it], digits)

    return {name: column(own) for name, own in groups.items()}


def after(scale: Scale) -> str:
    """First sentence of most notes."""
    return f"After {scale.context:,} tokens, T = 0.6, top-p 0.9; median and range over texts."


def curves(groups: Mapping[str, Mapping[str, Points]], **settings: Any) -> Draw:
    """Draws curves on axes with these settings: every group (what is measured here, what the paper
    says) in a style, every name in a color."""
    names = dict.fromkeys(itertools.chain(*groups.values()))
    colors = dict(zip(names, itertools.cycle(COLORS), strict=False))

    def draw(axes: Any) -> None:
        for (group, series), style in zip(groups.items(), STYLES, strict=False):
            for name, points in series.items():
                label = ", ".join(filter(None, (name, group)))
                axes.plot([*points], [*points.values()], style, color=colors[name], label=label)
        axes.set(**settings)
        if settings.get("xscale") == "log":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.tick_params("x", labelsize=8)

    return draw


def bars(groups: Mapping[str, Points], **settings: Any) -> Draw:
    """Draws a bar of every group for every name, next to each other."""

    def draw(axes: Any) -> None:
        names = list(dict.fromkeys(itertools.chain(*groups.values())))
        width = 0.8 / len(groups)
        for number, (group, heights) in enumerate(groups.items()):
            places = [names.index(name) + number * width for name in heights]
            color = COLORS[number % len(COLORS)]
            axes.bar(places, [*heights.values()], width, color=color, label=group)
        middles = [place + 0.4 - width / 2 for place in range(len(names))]
        axes.set_xticks(middles, [textwrap.fill(name, 12) for name in names], fontsize=7)
        axes.set(**settings)

    return draw
