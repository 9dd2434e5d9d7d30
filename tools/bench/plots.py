"""The pictures of the benchmarks, as PNG files; needs matplotlib."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

STYLES = {
    "autoregressive": ("#000000", "o"),
    "naive": ("#E69F00", "s"),
    "retrieval": ("#56B4E9", "^"),
    "triforce": ("#009E73", "D"),
    "auto": ("#D55E00", "o"),
    "transformers": ("#888888", "v"),
    "transformers lookup": ("#CC79A7", "P"),
    "openvino f16/bf16": ("#F0E442", "*"),
    "llama.cpp f16/f16": ("#0072B2", "X"),
}
"""Color (Okabe and Ito's, safe for the color-blind) and marker of a contestant."""


def png_file(text: str) -> Path:
    """A flag's value that names a picture which can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib; install it: pip install matplotlib")
    if not text.endswith(".png") or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a .png file in a folder that is there, such as speed.png"
        )
    return Path(text)


def draw_speedups(file: Path, result: dict[str, dict[str, Any]], title: str) -> None:
    """What `compare.summarise` says of the speedups over autoregressive decoding, as bars."""
    from matplotlib.figure import Figure

    speedups = [row["speedup"] for row in result.values()]
    medians = [speedup["median"] for speedup in speedups]
    below = [speedup["median"] - speedup["min"] for speedup in speedups]
    above = [speedup["max"] - speedup["median"] for speedup in speedups]
    figure = Figure(figsize=(1.6 + len(result), 4), layout="tight")
    axes = figure.subplots()
    bars = axes.bar(list(result), medians, yerr=(below, above), capsize=4)
    axes.bar_label(bars, fmt="%.2f", label_type="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("decoding speed, autoregressive = 1")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=20)
    figure.savefig(file, dpi=150)


def draw_contexts(
    file: Path, contexts: list[int], times: dict[str, list[float]], title: str
) -> None:
    """Milliseconds per token against the length of the prompt, a line per method, log-log.

    Made for a README: 7 inches wide, legible when shown 700 pixels wide.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for name in sorted(times, key=lambda name: -times[name][-1]):  # as the lines end
        color, marker = STYLES.get(name, ("#888888", "."))
        axes.plot(contexts, times[name], color=color, marker=marker, linewidth=2, label=name)
    axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set(xscale="log", yscale="log")
    locators = FixedLocator(contexts), LogLocator(subs=(1, 1.5, 2, 3, 5, 7))
    for axis, locator in zip((axes.xaxis, axes.yaxis), locators, strict=True):
        axis.set(major_locator=locator, minor_locator=NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.tick_params(labelsize=11, length=0)
    axes.set_xlabel("prompt, tokens", fontsize=12)
    axes.set_title("milliseconds per token", fontsize=12, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.005, title, fontsize=8, color="#555555")
    figure.savefig(file, dpi=150)
