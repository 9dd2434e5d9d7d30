"""Figure 6a: acceptance and speedup by budget of the retrieval cache."""

import itertools
from typing import Any

from minitri import SpeculationConfig
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

KNEE = 4096
"""Tokens beyond which acceptance gains little in the paper, of 122,880."""


def cells(scale: Scale) -> list[Json]:
    """Acceptance for every text and budget; speed for a text."""
    rates = [
        {"what": "rate", "text": text, "budget": budget}
        for text in range(min(scale.num_texts, 10))
        for budget in scale.budgets
    ]
    return [*rates, *({"what": "speed", "text": text} for text in range(scale.num_speed_texts))]


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance with a budget, or the speeds with all in turns."""
    scale = lab.scale
    if settings["what"] == "rate":
        continuation = lab.continuation(settings["text"], scale.context)
        speculation = lab.speculation("retrieval", budget=settings["budget"])
        probs_NV = continuation.by_cache(speculation, scale.gamma2)
        return continuation.rate(probs_NV, scale.gamma2)._asdict()
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways |= {str(it): lab.speculation("triforce", budget=it) for it in scale.budgets}
    prompt = lab.prompt(settings["text"], scale.context, lab.engine(scale.context))
    return lab.speeds(prompt, ways)


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every budget."""
    budgets = distinct(done, "budget")
    speeds = select(done, what="speed")
    rates = {it: [row["mean"] for row in select(done, budget=it)] for it in budgets}
    rows = [
        [
            f"{budget:,}",
            f"{100 * budget / scale.context:.1f}",
            spread(rates[budget], 3),
            spread(it[str(budget)]["speedup"]["median"] for it in speeds),
        ]
        for budget in budgets
    ]
    columns = ["budget, tokens", "% of the text", "accepted", "speedup"]
    table = Table(columns, rows, "Medians and ranges over texts; T = 0.6, top-p 0.9.")
    fastest = max(
        budgets,
        key=lambda it: sum(row[str(it)]["speedup"]["median"] for row in speeds),
        default=0,
    )
    means = [sum(rates[it]) / len(rates[it]) for it in budgets]
    rises = all(a <= b + 0.005 for a, b in itertools.pairwise(means))
    verdict = f"Acceptance {'rises' if rises else 'does not always rise'} with the budget, from "
    verdict += f"{means[0]:.3f} to {means[-1]:.3f}, by ever less; {fastest:,} tokens are fastest "
    verdict += "here, where attention takes a smaller share of the time than after 122,880 tokens."

    def draw(axes: Any) -> None:
        axes.plot(budgets, means, "o-", color="#56B4E9", label="accepted, here")
        axes.axvline(KNEE, color="#999999", linestyle=":", label="knee in the paper")
        axes.set(xscale="log", xlabel="budget, tokens", ylabel="accepted / tested")

    return Shown([table], verdict, draw)


ITEM = Item(
    "fig6a",
    "Figure 6a: acceptance and speedup by budget",
    "Acceptance rises with the budget up to 4,096 tokens of 122,880 and little beyond; that is the "
    "fastest budget.",
    cells,
    measure,
    show,
    minutes_here=3,
    minutes_gpu=30,
)
