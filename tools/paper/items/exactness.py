"""Ours: how far the published code's rule is from the target's distribution, by temperature.

Where the retrieval level rejects a guess of the drafter, the published code samples the next token
from p-hat in place of the residual norm(max(p-hat - q, 0)), and hands p-hat on as the distribution
that it was sampled from (`Middle_Spec` there, one drafted token a round). So that token follows

    m = min(q, p-hat) + (1 - sum(min(q, p-hat))) * r,   r = p-hat there, the residual here,

which is p-hat only with the residual. The target accepts it with probability min(1, p / p-hat), and
corrects from norm(max(p - p-hat, 0)), so the text follows p only if m = p-hat. That is measured of
the model, for every token at a place where the drafter guessed, given all before it; and of a toy
small enough to add up every text that it can write. Sums are exact: nothing is sampled.

In the toy, tables of random logits, a row for every context, stand for the drafter, the target with
its retrieval cache, and the target; in float64, without the code that the formulas are about.

Legend: N positions, V vocabulary; tensors may have more dimensions before that.
"""

import functools
import itertools
import random
import statistics
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.paper.item import Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, grid, grouped, means, select

RULES = ("published", "ours")
MODEL_AT = (0.0, 0.6, 1.0, 1.2)
"""Temperatures at which the real model is asked, as far as the scale has them."""
TOYS = range(8)
"""Seeds of toys, of which the mean is shown."""
TOLERANCE = 1e-6
"""Total variation that rounding explains."""
V = 4
GAMMA2 = 2
"""Tokens that the middle level collects, at least."""
HORIZON = 3
"""Tokens of a text that are compared."""
TARGET, MIDDLE, DRAFT = range(3)
Context = tuple[int, ...]
Texts = Counter[Context]
"""The probability of each text."""
Shares = dict[int, Tensor]
"""The probabilities (V,) of the next token, by the level it is from; they sum to 1 together."""


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)); zeros where p = q."""
    left_V = (p_V - q_V).clamp_min(0)
    return left_V / left_V.sum(-1, keepdim=True).clamp_min(1e-300)


def proposed(q_V: Tensor, phat_V: Tensor, is_exact: bool) -> Shares:
    """Tokens that the middle level proposes: the drafter's guesses or its corrections, m in all."""
    common_V = torch.minimum(q_V, phat_V)
    left_V = residual(phat_V, q_V) if is_exact else phat_V
    return {DRAFT: common_V, MIDDLE: (1 - common_V.sum(-1, keepdim=True)) * left_V}


def verified(guesses: Shares, phat_V: Tensor, p_V: Tensor) -> Shares:
    """Distribution of the target's token after guesses that are reported to follow p-hat."""
    passes_V = torch.where(phat_V > 0, p_V / phat_V, 0.0).clamp_max(1)
    accepted = {level: guess_V * passes_V for level, guess_V in guesses.items()}
    rejected = 1 - sum(accepted.values(), torch.zeros_like(p_V)).sum(-1, keepdim=True)
    return accepted | {TARGET: rejected * residual(p_V, phat_V)}


@dataclass(frozen=True)
class Toy:
    """The three levels."""

    seed: int
    temperature: float

    @functools.cache  # noqa: B019 (toys are few)
    def probs(self, level: int, context: Context) -> Tensor:
        """Distribution (V,) of a level's next token; lower levels are halfway to the target."""
        tables = [random.Random(f"{3 * self.seed + it} {context}") for it in {TARGET, level}]
        logits = [[table.gauss(0, 1.5) for _ in range(V)] for table in tables]
        logits_V = torch.tensor(logits, dtype=torch.float64).mean(0)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), V).double()
        return (logits_V / self.temperature).softmax(0)

    def next_token(self, tokens: Context, last: int, is_exact: bool) -> Shares:
        """After `tokens`, of which the last is from this level."""
        p_V, phat_V, q_V = (self.probs(level, tokens) for level in (TARGET, MIDDLE, DRAFT))
        if last == TARGET or (last == MIDDLE and len(tokens) >= GAMMA2):
            return {TARGET: p_V}  # it corrected a guess, or accepted them all, and goes on
        if last == DRAFT:
            return verified({MIDDLE: phat_V}, phat_V, p_V)  # the bonus token
        return verified(proposed(q_V, phat_V, is_exact), phat_V, p_V)

    def texts(self, is_exact: bool, tokens: Context = (), last: int = MIDDLE) -> Texts:
        """Tokens that a step emits after `tokens`, continued by the target."""
        if len(tokens) == HORIZON:
            return Texts({tokens: 1.0})
        texts = Texts()
        for level, probs_V in self.next_token(tokens, last, is_exact).items():
            for token, share in enumerate(probs_V.tolist()):
                for text, weight in self.texts(is_exact, (*tokens, token), level).items():
                    texts[text] += share * weight
        return texts


def toy_distance(seed: int, temperature: float, is_exact: bool) -> float:
    """Total variation of a toy's first tokens from the target's own."""
    toy = Toy(seed, temperature)
    texts, wanted = toy.texts(is_exact), toy.texts(is_exact, last=TARGET)
    return sum(abs(texts[it] - wanted[it]) for it in texts | wanted) / 2


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
    """Distances from the target by rule: of each new token, or of each toy's texts."""
    T = settings["temperature"]
    if settings["what"] == "toy":
        return {rule: [toy_distance(seed, T, rule == "ours") for seed in TOYS] for rule in RULES}
    scale = lab.scale
    said = lab.continuation(settings["text"], scale.context, T)
    [phat_NV] = said.by_cache(lab.speculation("retrieval"), scale.gamma2, said.model)
    q_NV = said.by_drafter(said.drafter, 1, min(252, scale.context // 8))
    num = min(len(q_NV), len(phat_NV))
    # Nothing is guessed about the first.
    rows = (it[1:num].double() for it in (q_NV, phat_NV, said.probs_NV))
    q_NV, phat_NV, p_NV = (it / it.sum(1, keepdim=True) for it in rows)
    found = {rule: next_token(q_NV, phat_NV, p_NV, rule) for rule in RULES}
    return {rule: total_variation(it, p_NV).tolist() for rule, it in found.items()}


def show(done: list[Done], scale: Scale) -> Shown:
    rows = {T: [f"{T:g}"] for T in scale.temperatures}
    columns, here, of_ours = ["T"], dict[str, dict[float, float]](), [0.0]
    for what, title in (("model", "model"), ("toy", "toys")):
        columns += [f"{title}: published rule, mean", "median", "worst", "ours, worst"]
        published, ours = (distances(select(done, what=what), rule) for rule in RULES)
        for T, row in rows.items():
            if T in ours:
                kinds = (statistics.mean, statistics.median, max)
                row += [*(f"{kind(published[T]):.4f}" for kind in kinds), f"{max(ours[T]):.0e}"]
            else:
                row += ["-"] * 4
        of_ours += map(max, ours.values())
        here[f"published, mean of {title}"] = means(published)
        if what == "model":
            for rule, found in (("published", published), ("ours", ours)):
                here[f"{rule}, worst token"] = {T: max(them) for T, them in found.items()}
    num_tokens = len(select(done, what="model")[0].values["ours"])
    note = f"Total variation from the target's distribution: of the next token after {num_tokens} "
    note += f"prefixes per text, where the drafter guesses; of the first {HORIZON} tokens of "
    note += f"{len(TOYS)} toys with {V} tokens, every outcome enumerated. The published rule is "
    note += "applied to our model."
    mean = max(here["published, mean of model"].values())
    worst = max(here["published, worst token"].values())
    keeps = "does not keep" if worst > TOLERANCE else "keeps"
    verdict = f"The published rule {keeps} the target's distribution: the total variation of a "
    verdict += f"token is {mean:.3f} on average at the worst temperature, and up to {worst:.2f}; "
    verdict += f"with the residual it is never more than {max(of_ours):.0e}."
    draw = curves({"": here}, xlabel="temperature", ylabel="total variation from the target")
    return Shown([Table(columns, [*rows.values()], note)], verdict, draw)


def distances(done: list[Done], rule: str) -> dict[float, list[float]]:
    """Distances of all texts or toys, by temperature."""
    cells = grouped(done, "temperature", rule)
    return {T: [*itertools.chain(*cells[T])] for T in sorted(cells)}


EXACTNESS = Item("exactness", cells, measure, show, 3, 40)
