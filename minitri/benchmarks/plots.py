"""The pictures of the benchmarks, as PNG files; needs matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitri.errors import InputError

STYLES = {
    "autoregressive": ("#000000", "o"),
    "naive": ("#E69F00", "s"),
    "retrieval": ("#56B4E9", "^"),
    "triforce": ("#009E73", "D"),
    "auto": ("#D55E00", "o"),
    "transformers": ("#888888", "v"),
    "transformers lookup": ("#CC79A7", "P"),
    "llama.cpp f16": ("#0072B2", "X"),
}
"""Color (Okabe and Ito's, safe for the color-blind) and marker of a contestant."""


def plotter(file: Path, draw: Callable[..., None]) -> Callable[..., None]:
    """`draw` for a PNG of this name. Raises `InputError` at once if that will not work."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            "--plot needs matplotlib; install it with: pip install matplotlib"
        ) from None
    if file.suffix != ".png" or not file.parent.is_dir():
        raise InputError(
            f"--plot {file} is not a .png file in a folder that is there; write for example "
            "speed.png"
        )
    matplotlib.use("agg")
    return functools.partial(draw, file)


Results = dict[int, dict[str, dict[str, Any]]]
"""Per length of the prompt and contestant, what `compare.summarise` says."""


def draw_speedups(file: Path, results: Results, title: str) -> None:
    """The speedups over autoregressive decoding as bars, with their ranges, at one length."""
    from matplotlib import pyplot

    [result] = results.values()
    names, speedups = list(result), [row["speedup"] for row in result.values()]
    medians = [speedup["median"] for speedup in speedups]
    below = [speedup["median"] - speedup["min"] for speedup in speedups]
    above = [speedup["max"] - speedup["median"] for speedup in speedups]
    figure, axes = pyplot.subplots(figsize=(1.6 + len(names), 4))
    bars = axes.bar(names, medians, yerr=(below, above), capsize=4)
    axes.bar_label(bars, fmt="%.2f", label_type="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("decoding speed, autoregressive = 1")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=20)
    save(figure, file)


def draw_contexts(file: Path, results: Results, title: str) -> None:
    """Milliseconds per token against the length of the prompt, a line per method, log-log.

    Made for a README: 7 inches wide, legible when shown 700 pixels wide.
    """
    from matplotlib import pyplot, ticker

    contexts = sorted(results)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    ends = {}
    for name in results[contexts[0]]:
        color, marker = STYLES.get(name, ("#888888", "."))
        medians = [results[context][name]["ms_per_token"]["median"] for context in contexts]
        axes.plot(contexts, medians, color=color, marker=marker, linewidth=2, label=name)
        ends[name] = medians[-1]
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: -ends[names[i]])  # as the lines end
    axes.legend(
        [handles[i] for i in order], [names[i] for i in order], frameon=False, fontsize=11,
        loc="center left", bbox_to_anchor=(1, 0.5),
    )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set(major_locator=ticker.FixedLocator(contexts), minor_locator=ticker.NullLocator())
    axes.yaxis.set(
        major_locator=ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)),
        minor_locator=ticker.NullLocator(),
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.tick_params(labelsize=11, length=0)
    axes.set_xlabel("prompt, tokens", fontsize=12)
    axes.set_title("milliseconds per token", fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, title, fontsize=8, color="#555555")
    save(figure, file)


def draw_synthetic(file: Path, result: dict[str, Any]) -> None:
    """The sweep over contexts of made-up models (the paper's figure 5): time and speedup."""
    from matplotlib import pyplot

    rows = result["rows"]
    contexts = [row["context"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    for method in ("autoregressive", "cascade"):
        times = [row[method]["ms_per_token"] for row in rows]
        left.plot(contexts, times, marker="o", label=method)
    left.set_ylabel("ms/token")
    left.legend()
    right.plot(contexts, [row["speedup"] for row in rows], marker="o")
    right.set_ylabel("speedup over autoregressive")
    for axes in (left, right):
        axes.set_xlabel("context, tokens")
        axes.set_ylim(bottom=0)
    title = f"SYNTHETIC: {result['shape']}, {result['device']}, acceptance {result['acceptance']}"
    figure.suptitle(title, fontsize=10)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Writes a figure and frees it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
