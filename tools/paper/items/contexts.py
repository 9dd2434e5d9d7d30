"""Figure 5: speedup by context, measured, and as arithmetic on an A100 far beyond."""

from typing import Any

from minitri import SpeculationConfig
from minitri.settings import MAX_GAMMA, StepPlan
from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

METHODS = ("triforce", "retrieval", "naive")
PUBLISHED_BOUND = 13.1
LENGTHS = [1 << n for n in range(13, 25)]
"""Of the predicted curves: 8,192 to 16,777,216 tokens."""
OPEN = [StepPlan("triforce", g1, 1 << n) for g1 in range(1, 5) for n in range(2, 7)]
NAIVE = [StepPlan("naive", gamma1) for gamma1 in range(1, MAX_GAMMA + 1)]
CURVES = {"gammas 2 and 6": [PAPER], "best gammas": OPEN, "naive, best gamma": NAIVE}


def cells(scale: Scale) -> list[Json]:
    """A cell for every length, with all methods."""
    return [{"context": context} for context in scale.contexts]


def measure(lab: Lab, settings: Json) -> Json:
    """All methods in turns after a text of a length."""
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways |= {name: lab.speculation(name) for name in METHODS}
    context = settings["context"]
    for name in ("triforce", "retrieval"):
        budget = min(lab.scale.budget, context // 2 // 8 * 8)
        ways[name] = lab.speculation(name, budget=budget)
    return lab.speeds(lab.prompt(0, context, lab.engine(context)), ways)


def predicted(plans: list[StepPlan]) -> list[float]:
    """The speedup of the best of these plans at all `LENGTHS`."""
    return [speedup(on_chip(num_tokens), plans) for num_tokens in LENGTHS]


def show(done: list[Done], scale: Scale) -> Shown:
    """A table of what was measured, and one of what is predicted."""
    contexts = distinct(done, "context")
    speeds = {
        name: [select(done, context=it)[0][name]["speedup"]["median"] for it in contexts]
        for name in METHODS
    }
    alone = [select(done, context=it)[0]["autoregressive"]["ms_per_token"] for it in contexts]
    rows = [
        [f"{it:,}", spread([ms["median"]], 1), *(f"{speeds[name][i]:.2f}" for name in METHODS)]
        for i, (it, ms) in enumerate(zip(contexts, alone, strict=True))
    ]
    columns = ["context, tokens", "autoregressive, ms/token", *METHODS]
    note = f"Speedups, one text, T = 0.6, top-p 0.9, {scale.new_tokens} tokens, budget of "
    note += f"{scale.budget:,} tokens or half of the context."
    curves = {name: predicted(plans) for name, plans in CURVES.items()}
    lines = [
        [f"{length:,}", *(f"{curve[i]:.2f}" for curve in curves.values())]
        for i, length in enumerate(LENGTHS)
    ]
    bounds = [bound(RATES[it]) for it in ("retrieval", "draft")]
    more = "7B on an A100 with the paper's acceptance at T = 0, by bytes over bandwidth, as if the "
    more += "KV cache fitted. Bounds, for guesses that cost nothing and a gamma2 without limit: "
    more += f"1 / (1 - {RATES['retrieval']}) = {bounds[0]:.2f}, naive 1 / (1 - {RATES['draft']}) = "
    more += f"{bounds[1]:.2f}, {bounds[0] / bounds[1]:.1f} times less."
    tables = [
        Table(columns, rows, note),
        Table(["predicted, tokens", *CURVES], lines, more),
    ]
    grows = speeds["triforce"][-1] > speeds["triforce"][0]
    verdict = f"Speedup {'grows' if grows else 'does not grow'} with the context here, from "
    verdict += f"{speeds['triforce'][0]:.2f} after {contexts[0]:,} tokens to "
    verdict += f"{speeds['triforce'][-1]:.2f} after {contexts[-1]:,}. The bound of "
    verdict += f"{PUBLISHED_BOUND} is 1 / (1 - acceptance) with 0.9234 of table 2, so it assumes "
    verdict += "free guesses and ever longer blocks; with gammas 2 and 6 the limit is "
    verdict += f"{curves['gammas 2 and 6'][-1]:.1f}."

    def draw(axes: Any) -> None:
        colors = ("#009E73", "#56B4E9", "#D55E00")
        for name, color in zip(METHODS, colors, strict=True):
            axes.plot(contexts, speeds[name], "o-", color=color, label=f"{name}, here")
        for (name, curve), color in zip(curves.items(), colors, strict=True):
            axes.plot(LENGTHS, curve, ":", color=color, label=f"{name}, A100, predicted")
        axes.axhline(PUBLISHED_BOUND, color="#999999", linewidth=0.8, label="bound in the paper")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="context, tokens", ylabel="speedup", ylim=(0, None))

    return Shown(tables, verdict, draw)


ITEM = Item(
    "fig5",
    "Figure 5: speedup by context",
    "The speedup grows with the context; in theory it could reach 13.1, 7 times more than the "
    "naive policy.",
    cells,
    measure,
    show,
    minutes_here=4,
    minutes_gpu=10,
)
