"""Figure 6c: tokens per step by shape of the tree of guesses."""

import functools
import itertools

from minitri.core.settings import StepPlan
from minitri.trees.tree_shape import sequences, shape_of
from tools.paper.costs import A100, on_chip
from tools.paper.item import Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, grid, means, select, spread

TEMPERATURES = (0.0, 0.6)
DEPTHS = {"naive": 4, "retrieval": 6}
"""Guesses of a chain, and levels of a tree: of the drafter, and with the retrieval cache."""
WIDTHS = {"naive": (2, 4, 8), "retrieval": (4,)}
"""Nodes of a tree over those of a chain."""


def plans(method: str) -> dict[str, StepPlan]:
    """Shapes that are compared, by name: first the chain."""
    depth = DEPTHS[method]
    gammas = (depth, 0) if method == "naive" else (0, depth)
    named = {"chain": StepPlan(method, *gammas)}
    for width in WIDTHS[method]:
        named[f"{width} sequences"] = StepPlan(method, *gammas, f"{width}x{depth}")
        named[f"Sequoia, {width * depth} nodes"] = StepPlan(method, *gammas, str(width * depth))
    return named


def cells(scale: Scale) -> list[Json]:
    """A cell holds all shapes of a method in turns; the slower method has one text."""
    found = grid(text=range(scale.num_speed_texts), method=DEPTHS, temperature=TEMPERATURES)
    return [it for it in found if it["method"] == "naive" or it["text"] == 0]


def measure(lab: Lab, settings: Json) -> Json:
    """Tokens per step of all shapes after a text."""
    ways = {}
    for name, plan in plans(settings["method"]).items():
        gammas = {"gamma1": plan.gamma1 or None, "gamma2": plan.gamma2 or None}
        ways[name] = lab.speculation(plan.method, **gammas, tree=plan.tree)
    return lab.speeds(settings["text"], ways, temperature=settings["temperature"])


def gpu_speedup(plan: StepPlan, tokens_per_step: float) -> float:
    """Over autoregressive decoding of 7B after 122,880 tokens on an A100, by bytes over bandwidth;
    a pass of the proposer reads all nodes that the tree has so far."""
    costs = functools.partial(on_chip(122_880).seconds, A100)
    proposer = plan.proposers[0]
    shape = shape_of(plan) if plan.tree else sequences(1, plan.gamma1 or plan.gamma2)
    known = itertools.accumulate(shape.sizes[:-1])
    seconds = sum(costs(proposer, nodes - 1) for nodes in known) + costs("target", len(shape) - 1)
    return tokens_per_step * costs("target", 0) / seconds


def show(done: list[Done], scale: Scale) -> Shown:
    found = {
        (method, name, T): [
            it.values[name]["tokens_per_step"] for it in select(done, method=method, temperature=T)
        ]
        for method in DEPTHS
        for name in plans(method)
        for T in TEMPERATURES
    }
    here = means(found)
    columns, rows = ["guesses by", "shape"], []
    for T in TEMPERATURES:
        columns += [f"tokens per step, T = {T:g}", "A100, predicted"]
    for method in DEPTHS:
        for name, plan in plans(method).items():
            rows.append([method, name])
            for T in TEMPERATURES:
                predicted = gpu_speedup(plan, here[method, name, T])
                rows[-1] += [spread(found[method, name, T]), f"{predicted:.2f}"]
    note = f"After {scale.context:,} tokens, median and range over texts; next to it the speedup "
    note += "of 7B after 122,880 tokens with so many, by bytes over bandwidth."
    parts = []
    for kind, who in (("naive", "the drafter's"), ("retrieval", "the retrieval cache's")):
        gains = [
            mean - here[method, "chain", T]
            for (method, name, T), mean in here.items()
            if method == kind and name != "chain"
        ]
        parts.append(f"{min(gains):.2f} to {max(gains):.2f} by {who}")
    verdict = "Over chains of the same depth trees gain, in tokens a step, "
    verdict += f"{' guesses and '.join(parts)}."
    sizes = [DEPTHS["naive"] * width for width in (1, *WIDTHS["naive"])]
    lines: dict[str, Json] = {f"T = {T:g}": {} for T in TEMPERATURES}
    for kind, T in itertools.product(("Sequoia", "sequences"), TEMPERATURES):
        names = ["chain", *(name for name in plans("naive") if kind in name)]
        heights = (here["naive", name, T] for name in names)
        lines[f"T = {T:g}"][kind] = dict(zip(sizes, heights, strict=True))
    draw = curves(lines, xlabel="guesses of the drafter in a step", ylabel="tokens per step")
    return Shown([Table(columns, rows, note)], verdict, draw)


FIG6C = Item("fig6c", cells, measure, show, 5, 30)
