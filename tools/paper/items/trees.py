"""Figure 6c: tokens per step by shape of the tree of guesses, chains being trees, too."""

import functools
import itertools
from typing import Any

from minitri import SpeculationConfig
from minitri.settings import StepPlan
from minitri.trees.shape import sequences, shape_of
from tools.paper.costs import A100, on_chip
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TEMPERATURES = (0.0, 0.6)
DEPTHS = {"naive": 4, "retrieval": 6}
"""Guesses of a chain of each method, and levels of its trees: of the drafter, and of the target
with its retrieval cache."""
WIDTHS = {"naive": (2, 4, 8), "retrieval": (4,)}
"""Nodes of a tree over those of a chain."""


def plans(method: str) -> dict[str, StepPlan]:
    """What is compared, by name: first the chain."""
    depth = DEPTHS[method]
    gammas = (depth, 0) if method == "naive" else (0, depth)
    named = {"chain": StepPlan(method, *gammas)}
    for width in WIDTHS[method]:
        named[f"{width} sequences"] = StepPlan(method, *gammas, f"{width}x{depth}")
        named[f"Sequoia, {width * depth} nodes"] = StepPlan(method, *gammas, str(width * depth))
    return named


def cells(scale: Scale) -> list[Json]:
    """A cell holds all shapes of a method in turns."""
    return [
        {"text": text, "method": method, "temperature": temperature}
        for text in range(scale.num_speed_texts)
        for method in DEPTHS
        for temperature in TEMPERATURES
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """Tokens per step, and times, of all shapes after a text."""
    method = settings["method"]
    ways: dict[str, SpeculationConfig] = {}
    for name, plan in plans(method).items():
        gammas = {"gamma1": plan.gamma1 or None, "gamma2": plan.gamma2 or None}
        ways[name] = lab.speculation(method, **gammas, tree=plan.tree)
    prompt = lab.prompt(settings["text"], lab.scale.context, lab.engine(lab.scale.context))
    return lab.speeds(prompt, ways, temperature=settings["temperature"])


def gpu_speedup(plan: StepPlan, tokens_per_step: float) -> float:
    """Over autoregressive decoding of 7B after 122,880 tokens on an A100, by bytes over bandwidth;
    a pass of the proposer reads all nodes that the tree has so far."""
    costs = functools.partial(on_chip(122_880).seconds, A100)
    proposer = "draft" if plan.uses_drafter else "retrieval"
    shape = shape_of(plan) if plan.tree else sequences(1, plan.gamma1 or plan.gamma2)
    known = itertools.accumulate(shape.sizes[:-1])
    seconds = sum(costs(proposer, nodes - 1) for nodes in known)
    seconds += costs("target", len(shape) - 1)
    return tokens_per_step * costs("target", 0) / seconds


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every shape of every method."""
    temperatures = distinct(done, "temperature")
    rows, means = [], dict[tuple[str, str, float], float]()
    for method in distinct(done, "method"):
        for name, plan in plans(method).items():
            row = [method, name]
            for T in temperatures:
                cells = select(done, method=method, temperature=T)
                own = [it[name]["tokens_per_step"] for it in cells]
                means[method, name, T] = sum(own) / len(own)
                row += [spread(own), f"{gpu_speedup(plan, means[method, name, T]):.2f}"]
            rows.append(row)
    columns = ["guesses by", "shape"]
    for T in temperatures:
        columns += [f"tokens per step, T = {T:g}", "A100, predicted"]
    note = f"After {scale.context:,} tokens, median and range over texts; in the last column of "
    note += "each pair what that would gain for 7B after 122,880 tokens, by bytes over bandwidth."
    naive = [(name, T) for method, name, T in means if method == "naive"]
    best = max(naive, key=lambda it: means["naive", *it], default=("chain", 0.0))
    sizes = [f"{width * DEPTHS['naive']} nodes" for width in WIDTHS["naive"]]
    pairs = [
        (means["naive", f"Sequoia, {size}", T], means["naive", f"{width} sequences", T])
        for size, width in zip(sizes, WIDTHS["naive"], strict=True)
        for T in temperatures
    ]
    num_ahead = sum(a >= b for a, b in pairs)
    verdict = f"Trees lead further than chains: {means['naive', *best]:.2f} tokens a step by "
    verdict += f"{best[0]} against {means['naive', 'chain', best[1]]:.2f} at T = {best[1]:g}; "
    verdict += f"at equally many nodes Sequoia is ahead of sequences in {num_ahead} of "
    verdict += f"{len(pairs)} cases."

    def draw(axes: Any) -> None:
        for T, style in zip(temperatures, ("-", "--"), strict=False):
            for kind, color in (("Sequoia", "#009E73"), ("sequences", "#D55E00")):
                names = [name for name in plans("naive") if kind in name]
                ys = [means["naive", name, T] for name in ("chain", *names)]
                nodes = [DEPTHS["naive"] * width for width in (1, *WIDTHS["naive"])]
                axes.plot(nodes, ys, f"o{style}", color=color, label=f"{kind}, T = {T:g}")
        axes.set(xlabel="guessed tokens in a step", ylabel="tokens per step")

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "fig6c",
    "Figure 6c: tokens per step by shape of the tree",
    "Sequoia trees and independent sequences make more tokens per step of the target than chains, "
    "the more the more guesses there are.",
    cells,
    measure,
    show,
    minutes_here=4,
    minutes_gpu=30,
)
