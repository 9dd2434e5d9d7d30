"""Figure 5: speedup by context, measured, and on an A100 by arithmetic far beyond."""

from typing import Any

from minitri import SpeculationConfig
from minitri.settings import StepPlan
from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Figure 5: speedup by context"
CLAIM = (
    "The speedup grows with the context; in theory it could reach 13.1, 7 times more than the "
    "naive policy."
)
METHODS = ("triforce", "retrieval", "naive")
COLORS = ("#009E73", "#56B4E9", "#D55E00")
LENGTHS = [1 << n for n in range(13, 25)]
"""Of the predicted curves: 8,192 to 16,777,216 tokens."""
OPEN = [StepPlan("triforce", g1, 1 << n) for g1 in range(1, 5) for n in range(2, 7)]
NAIVE = [StepPlan("naive", gamma1) for gamma1 in range(1, 17)]
CURVES = {"gammas 2 and 6": [PAPER], "best gammas": OPEN, "naive, best gamma": NAIVE}


def cells(scale: Scale) -> list[Json]:
    """A cell for every length, with all methods."""
    return [{"context": context} for context in scale.contexts]


def measure(lab: Lab, settings: Json) -> Json:
    """All methods in turns after a text of a length; half of it is the largest budget."""
    context = settings["context"]
    budget = min(lab.scale.budget, context // 16 * 8)
    ways = {name: lab.speculation(name, budget=budget) for name in METHODS}
    alone = {"autoregressive": SpeculationConfig("autoregressive")}
    return lab.speeds(lab.prompt(0, context, lab.engine(context)), alone | ways)


def show(done: list[Done], scale: Scale) -> Shown:
    """A table of what was measured, and one of what is predicted."""
    contexts = distinct(done, "context")
    found = [select(done, context=it)[0] for it in contexts]
    speeds = {name: [it[name]["speedup"]["median"] for it in found] for name in METHODS}
    rows = [
        [f"{n:,}", f"{it['autoregressive']['ms_per_token']['median']:.1f}", *map(_two, gains)]
        for n, it, gains in zip(contexts, found, zip(*speeds.values(), strict=True), strict=True)
    ]
    columns = ["context, tokens", "autoregressive, ms/token", *METHODS]
    note = f"Speedups, one text, T = 0.6, top-p 0.9, {scale.new_tokens} tokens, budget of "
    note += f"{scale.budget:,} tokens or half of the context."
    curves = {
        name: [speedup(on_chip(length), plans) for length in LENGTHS]
        for name, plans in CURVES.items()
    }
    lines = [
        [f"{length:,}", *map(_two, gains)]
        for length, gains in zip(LENGTHS, zip(*curves.values(), strict=True), strict=True)
    ]
    rate, naive = RATES["retrieval"], RATES["draft"]
    more = "7B on an A100 with the paper's acceptance at T = 0, by bytes over bandwidth, as if the "
    more += "KV cache fitted. Bounds, for guesses that cost nothing and blocks without limit: "
    more += f"1 / (1 - {rate}) = {bound(rate):.2f}, naive 1 / (1 - {naive}) = {bound(naive):.2f}."
    paper = speedup(on_chip(122_880), [PAPER])
    more += f" After 122,880 tokens {paper:.2f} is predicted, and 2.31 was published."
    tables = [Table(columns, rows, note), Table(["predicted, tokens", *CURVES], lines, more)]
    first, last = speeds["triforce"][0], speeds["triforce"][-1]
    verdict = f"The speedup {'grows' if last > first else 'does not grow'} here, from {first:.2f} "
    verdict += f"after {contexts[0]:,} tokens to {last:.2f} after {contexts[-1]:,}. The paper's "
    verdict += f"13.1 is 1 / (1 - {rate}), the acceptance of table 2 at T = 0 with free guesses and"
    verdict += (
        f" blocks without limit; with gammas 2 and 6 it is {curves['gammas 2 and 6'][-1]:.1f}."
    )

    def draw(axes: Any) -> None:
        for name, color in zip(METHODS, COLORS, strict=True):
            axes.plot(contexts, speeds[name], "o-", color=color, label=f"{name}, here")
        for (name, curve), color in zip(curves.items(), COLORS, strict=True):
            axes.plot(LENGTHS, curve, ":", color=color, label=f"{name}, A100, predicted")
        axes.axhline(bound(rate), color="#999999", linewidth=0.8, label="bound")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="context, tokens", ylabel="speedup", ylim=(0, None))

    return Shown(tables, verdict, draw)


def _two(number: float) -> str:
    return f"{number:.2f}"


ITEM = Item("fig5", TITLE, CLAIM, cells, measure, show, minutes_here=4, minutes_gpu=10)
