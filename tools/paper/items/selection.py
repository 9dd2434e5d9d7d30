"""Figure 3b: acceptance of what the target guesses with a part of its KV cache, by budget."""

import statistics
from typing import Any

from tools.paper.baselines.bounds import first_layers_whole
from tools.paper.baselines.policies import speculation_with
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

NUM_WHOLE = 2
"""First layers that attend to the whole text, as in the paper's figure."""
TITLES = {"topk": "Top-K", "streaming": "StreamingLLM", "h2o": "H2O"}
COLORS = {"topk": "#999999", "streaming": "#D55E00", "h2o": "#56B4E9"}
PUBLISHED = {"topk": "0.976", "streaming": "over 0.905", "h2o": "over 0.905"}
"""With 1K tokens of 120K."""


def cells(scale: Scale) -> list[Json]:
    """Every policy with every budget."""
    texts = range(min(scale.num_texts, 2 if scale.name == "cpu" else 5))
    return [
        {"text": text, "policy": policy, "budget": budget}
        for text in texts
        for policy in TITLES
        for budget in scale.budgets
    ]


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance."""
    gamma = lab.scale.gamma2
    said = lab.continuation(settings["text"], lab.scale.context)
    num_whole = min(NUM_WHOLE, said.model.config.num_layers // 2)
    budget = settings["budget"]
    if settings["policy"] == "topk":
        return said.rate(said.by_top_tokens(budget, gamma, num_whole), gamma)._asdict()
    usual = lab.speculation("retrieval", budget=budget)
    speculation = speculation_with(settings["policy"], usual)
    model = first_layers_whole(said.model, said.full, num_whole)
    return said.rate(said.by_cache(speculation, gamma, model), gamma)._asdict()


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every budget."""
    budgets = distinct(done, "budget")

    def found(policy: str, budget: int) -> list[float]:
        return [it["mean"] for it in select(done, policy=policy, budget=budget)]

    rows = [
        [
            f"{budget:,}",
            f"{100 * budget / scale.context:.1f}",
            *(spread(found(policy, budget), 3) for policy in TITLES),
        ]
        for budget in budgets
    ]
    paper = ["paper: 1,024", "0.8", *PUBLISHED.values()]
    note = "Accepted / tested, medians and ranges over texts; T = 0.6, top-p 0.9; the first two "
    note += "layers attend to the whole text."
    columns = ["budget, tokens", "% of the text", *TITLES.values()]
    means = {
        policy: {it: statistics.mean(found(policy, it)) for it in budgets if found(policy, it)}
        for policy in distinct(done, "policy")
    }
    parts = [
        f"{TITLES[policy]} {min(row.values()):.3f} to {max(row.values()):.3f}"
        for policy, row in means.items()
    ]
    verdict = f"From {budgets[0]:,} to {budgets[-1]:,} tokens: {', '.join(parts)}. "
    if all(max(row.values()) > 0.9 for row in means.values()):
        verdict += "A small part of the cache is enough for a high acceptance, by all policies."
    else:
        verdict += "Not all policies come above 0.9 with these budgets."

    def draw(axes: Any) -> None:
        for policy, row in means.items():
            axes.plot([*row], [*row.values()], "o-", color=COLORS[policy], label=TITLES[policy])
        axes.set(xscale="log", xlabel="budget, tokens", ylabel="accepted / tested", ylim=(None, 1))

    return Shown([Table(columns, [*rows, paper], note)], verdict, draw)


ITEM = Item(
    "fig3b",
    "Figure 3b: acceptance by budget and policy",
    "With a budget of 1K of 120K tokens, Top-K reaches an acceptance of 97.6%, H2O and "
    "StreamingLLM over 90.5%; the first two layers keep the whole cache.",
    cells,
    measure,
    show,
    minutes_here=6,
    minutes_gpu=50,
)
