"""Ours: how far the published code's rule is from the target's distribution, by temperature.

Where the retrieval level rejects a guess of the drafter, the published code samples the next token
from p-hat in place of the residual norm(max(p-hat - q, 0)), and hands p-hat on as the distribution
that it was sampled from (`Middle_Spec` there). So the middle's token follows

    m = min(q, p-hat) + (1 - sum(min(q, p-hat))) * r,   r = p-hat there, the residual here,

which is p-hat only with the residual. The target accepts it with probability min(1, p / p-hat), and
corrects from norm(max(p - p-hat, 0)). So the next token follows

    f = m * min(1, p / p-hat) + (1 - sum(m * min(1, p / p-hat))) * norm(max(p - p-hat, 0)),

and f = p if m = p-hat. Both sums are exact: nothing is sampled. This is the distribution of every
token at a place where the drafter guessed, given all before it. The code drafts one token a round
(gamma1 = 1), and the bonus token after an accepted one is right.

Legend: N positions, V vocabulary.
"""

import statistics

import torch
from torch import Tensor

from tools.paper.item import Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, distinct, grid, means, select
from tools.paper.toy import proposed, toy_distance, verified

RULES = ("published", "ours")
MODEL_AT = (0.0, 0.6, 1.0, 1.2)
"""Temperatures at which the real model is asked, as far as the scale has them."""
TOYS = range(8)
"""Seeds of toys, of which the mean is shown."""


def next_token(q_NV: Tensor, phat_NV: Tensor, p_NV: Tensor, rule: str) -> Tensor:
    """The distributions (N, V) that the text's next tokens follow by a rule of `RULES`."""
    guesses = proposed(q_NV, phat_NV, is_exact=rule == "ours")
    return sum(verified(guesses, phat_NV, p_NV).values(), torch.zeros_like(p_NV))


def total_variation(a_NV: Tensor, b_NV: Tensor) -> Tensor:
    """Half the sum of the differences, (N,)."""
    return (a_NV - b_NV).abs().sum(1) / 2


def cells(scale: Scale) -> list[Json]:
    """The real model after every text, and the toys, by temperature."""
    asked = [T for T in MODEL_AT if T in scale.temperatures]
    real = grid(what=["model"], text=range(scale.num_speed_texts), temperature=asked)
    return real + grid(what=["toy"], temperature=scale.temperatures)


def measure(lab: Lab, settings: Json) -> Json:
    """By every rule the distances from the target: of each new token, or of each toy's texts."""
    T = settings["temperature"]
    if settings["what"] == "toy":
        return {rule: [toy_distance(seed, T, rule == "ours") for seed in TOYS] for rule in RULES}
    scale = lab.scale
    continuation = lab.continuation(settings["text"], scale.context, T)
    drafter = lab.engine(scale.context).models.draft or continuation.model
    window = min(252, scale.context // 8)
    rows = [
        continuation.by_drafter(drafter, 1, window),
        *continuation.by_cache(lab.speculation("retrieval"), scale.gamma2, continuation.model),
        continuation.probs_NV,
    ]
    num = min(map(len, rows))
    rows = [it[1:num].double() for it in rows]  # nothing is guessed about the first
    q, phat, p = (it / it.sum(1, keepdim=True) for it in rows)
    return {rule: total_variation(next_token(q, phat, p, rule), p).tolist() for rule in RULES}


def show(done: list[Done], scale: Scale) -> Shown:
    temperatures = sorted(distinct(done, "temperature"))
    rows = {T: [f"{T:g}"] for T in temperatures}
    columns, here, worst_of_ours = ["T"], dict[str, dict[float, float]](), 0.0
    for what, title in (("model", "model"), ("toy", "toys")):
        columns += [f"{title}: published rule, mean", "median", "worst", "ours, worst"]
        found = {rule: distances(done, what, rule) for rule in RULES}
        published, ours = found["published"], found["ours"]
        for T, row in rows.items():
            if T not in ours:
                row += ["-"] * 4
                continue
            kinds = (statistics.mean, statistics.median, max)
            row += [*(f"{kind(published[T]):.4f}" for kind in kinds), f"{max(ours[T]):.0e}"]
        worst_of_ours = max(worst_of_ours, *map(max, ours.values()), 0)
        here[f"published, mean of {title}"] = means(published)
        for rule in RULES if what == "model" else ():
            here[f"{rule}, worst token"] = {T: max(them) for T, them in found[rule].items()}
    note = "Total variation from the target's distribution: of the next token after each of "
    note += f"{scale.new_tokens} prefixes per text, where the drafter guesses; of the first 3 "
    note += f"tokens of {len(TOYS)} toys with 4 tokens, every outcome enumerated. The published "
    note += "rule is applied to our model."
    mean = max(here["published, mean of model"].values(), default=0)
    worst = max(here["published, worst token"].values(), default=0)
    verdict = "The published rule does not keep the target's distribution above T = 0: the total "
    verdict += f"variation of a token is {mean:.3f} on average at the worst temperature, and up to "
    verdict += f"{worst:.2f}; with the residual it is never more than {worst_of_ours:.0e}."
    draw = curves({"": here}, xlabel="temperature", ylabel="total variation from the target")
    return Shown([Table(columns, [*rows.values()], note)], verdict, draw)


def distances(done: list[Done], what: str, rule: str) -> dict[float, list[float]]:
    """By temperature, of all texts or toys."""
    cells = [it for it in done if it.settings["what"] == what]
    return {
        T: [distance for it in select(cells, temperature=T) for distance in it[rule]]
        for T in sorted(distinct(cells, "temperature"))
    }


ITEM = Item.of("exactness", cells, measure, show, minutes=(3, 40))
