"""Ours: twelve rules to accept guesses, each by its distance from the target's distribution.

Of toys, small enough to add up every outcome of a step of two guesses, and of the model: there the
next token where the drafter made one guess, by formulas over the whole vocabulary. Nothing is
sampled. The rules are those of `tools/paper/court.py`.

"Recovered from p" is what the published code of TriForce does where the retrieval level rejects a
guess of the drafter: it samples the next token from p-hat in place of norm(max(p-hat - q, 0)), and
hands p-hat on as the distribution that it was sampled from (`Middle_Spec` there, one drafted token
a round). So that token follows min(q, p-hat) + (1 - sum(min(q, p-hat))) * p-hat, which is not
p-hat; the target, which accepts it with probability min(1, p / p-hat), does not mend that.

In a toy tables of random logits, a row for every text, stand for the drafter and the target, in
float64.

Legend: N positions, V vocabulary.
"""

import functools
import random
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.decoding.reference import Model
from tools.paper.court import LOSSLESS, RULES, distance
from tools.paper.item import Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, grid, grouped, select

MODEL_AT = (0.0, 0.6, 1.0, 1.2)
"""Temperatures at which the real model is asked, as far as the scale has them."""
TOYS = range(4)
"""Seeds of toys, of which the worst is shown."""
NUM_TOKENS = 4
"""Vocabulary of a toy."""
TARGET, DRAFT = 0, 2


def cells(scale: Scale) -> list[Json]:
    """The real model after every text, and the toys, by temperature."""
    asked = [T for T in MODEL_AT if T in scale.temperatures]
    real = grid(what=["model"], text=range(scale.num_speed_texts), temperature=asked)
    return real + grid(what=["toy"], temperature=scale.temperatures)


def toy_distances(temperature: float) -> dict[str, float]:
    """The largest total variation of toys' first tokens from the target's own, by rule."""
    found = dict.fromkeys(RULES, 0.0)
    for seed in TOYS:
        draft, target = (toy_model(seed, temperature, level) for level in (DRAFT, TARGET))
        for name, rule in RULES.items():
            found[name] = max(found[name], distance(rule, draft, target))
    return found


def toy_model(seed: int, temperature: float, level: int) -> Model:
    """A toy's level as a function of the text; the drafter's logits are halfway to the target's."""

    @functools.cache
    def probs(text: tuple[int, ...]) -> list[float]:
        tables = [random.Random(f"{3 * seed + it} {text}") for it in {TARGET, level}]
        logits = [[table.gauss(0, 1.5) for _ in range(NUM_TOKENS)] for table in tables]
        logits_V = torch.tensor(logits, dtype=torch.float64).mean(0)
        if temperature == 0:
            return F.one_hot(logits_V.argmax(), NUM_TOKENS).tolist()
        return (logits_V / temperature).softmax(0).tolist()

    return lambda text: probs((*text,))


def residual(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """norm(max(p - q, 0)); zeros where p = q."""
    left_NV = (p_NV - q_NV).clamp_min(0)
    return left_NV / left_NV.sum(1, keepdim=True).clamp_min(1e-300)


def next_token(name: str, q_NV: Tensor, p_NV: Tensor) -> Tensor:
    """The distributions (N, V) of the next tokens by a rule, after one guess."""
    left_NV = residual(p_NV, q_NV)
    kept_NV = torch.minimum(q_NV, p_NV)
    match name:
        case "coupled" | "sample and match":
            return p_NV
        case "accept the argmax":
            return F.one_hot(p_NV.argmax(1), p_NV.shape[1]).to(p_NV)
        case "accept what is in the top 2":
            left_NV, kept_NV = p_NV, q_NV * (p_NV >= p_NV.topk(2).values[:, 1:])
        case "typical acceptance":
            bounds_N1 = 0.3 * (-torch.special.entr(p_NV).sum(1, keepdim=True)).exp()
            left_NV, kept_NV = p_NV, q_NV * (p_NV > bounds_N1.clamp_max(0.09))
        case "greedy guess, soft q":
            guesses_NV = F.one_hot(q_NV.argmax(1), q_NV.shape[1])
            kept_NV = guesses_NV * (p_NV / q_NV.clamp_min(1e-300)).clamp_max(1)
        case "filtered guess, whole q":
            kept_NV = likeliest(q_NV) * (p_NV / q_NV.clamp_min(1e-300)).clamp_max(1)
        case "recovered from p":
            left_NV = p_NV
        case "one number for test and recovery":
            return kept_NV + recovered_by_one_number(q_NV, p_NV, left_NV)
    return kept_NV + (1 - kept_NV.sum(1, keepdim=True)) * left_NV


def likeliest(q_NV: Tensor, share: float = 0.9) -> Tensor:
    """The distributions of the likeliest tokens that hold a share of the probability."""
    sorted_NV, order_NV = q_NV.sort(1, descending=True)
    kept_NV = sorted_NV * (sorted_NV.cumsum(1) - sorted_NV < share)
    return torch.zeros_like(q_NV).scatter_(1, order_NV, kept_NV / kept_NV.sum(1, keepdim=True))


def recovered_by_one_number(q_NV: Tensor, p_NV: Tensor, left_NV: Tensor) -> Tensor:
    """Probabilities of tokens in place of a rejected guess, chosen by the number u that rejected.

    Guess x is rejected if u >= a(x) = p(x) / q(x). So token y comes with the integral over u, where
    the residual's sum passes y, of R(u) = sum of q(x) over all a(x) <= u; its integral from 0 to u
    is G(u) = sum of q(x) (u - a(x)) over these x.
    """
    ratios_NV, order_NV = (p_NV / q_NV).where(q_NV > 0, 1.0).clamp_max(1).sort(1)
    mass_NV = q_NV.gather(1, order_NV)
    rejected_NV = F.pad(mass_NV.cumsum(1), (1, 0))
    moment_NV = F.pad((mass_NV * ratios_NV).cumsum(1), (1, 0))
    ends_NV = F.pad(left_NV.cumsum(1), (1, 0)).clamp_max(1)
    places_NV = torch.searchsorted(ratios_NV, ends_NV, right=True)
    integral_NV = ends_NV * rejected_NV.gather(1, places_NV) - moment_NV.gather(1, places_NV)
    return integral_NV.diff(dim=1)


def measure(lab: Lab, settings: Json) -> Json:
    """Distances from the target, by rule."""
    T = settings["temperature"]
    if settings["what"] == "toy":
        return toy_distances(T)
    said = lab.continuation(settings["text"], lab.scale.context, T)
    q_NV = said.by_drafter(said.drafter, 1, min(252, lab.scale.context // 8))
    # Nothing is guessed about the first.
    rows = (it[1 : len(q_NV)].double() for it in (q_NV, said.probs_NV))
    q_NV, p_NV = (it / it.sum(1, keepdim=True) for it in rows)
    errors = {name: next_token(name, q_NV, p_NV) - p_NV for name in RULES}
    return {name: it.abs().sum(1).mean().item() / 2 for name, it in errors.items()}


def show(done: list[Done], scale: Scale) -> Shown:
    asked = [T for T in MODEL_AT if T in scale.temperatures]
    rows, series = [], dict[str, dict[float, float]]()
    for name in RULES:
        toys = {T: them[0] for T, them in by_temperature(done, "toy", name).items()}
        real = {T: statistics.mean(it) for T, it in by_temperature(done, "model", name).items()}
        worst = max(toys, key=toys.__getitem__)
        row = [name, "yes" if name in LOSSLESS else "no", f"{toys[worst]:.0e}", f"{worst:g}"]
        rows.append([*row, *(f"{real[T]:.4f}" for T in asked)])
        if name not in LOSSLESS:
            series[name] = real
    columns = ["rule", "lossless", "toys, worst", "at T =", *(f"model, T = {T:g}" for T in asked)]
    note = "Total variation from the target: of the first three tokens of toys with four, every "
    note += "outcome of a step added up; of the model's next token after one guess, on average."
    toys_done = select(done, what="toy")
    most = max(cell.values[name] for cell in toys_done for name in LOSSLESS)
    least = min(max(it.values[name] for it in toys_done) for name in RULES if name not in LOSSLESS)
    verdict = f"Rules that are lossless by their proof are within {most:.0e} of the target's "
    verdict += (
        f"distribution in every toy; each of the others is off by at least {least:.2f} in one."
    )
    draw = curves({"": series}, xlabel="temperature", ylabel="total variation from the target")
    return Shown([Table(columns, rows, note)], verdict, draw)


def by_temperature(done: list[Done], what: str, name: str) -> dict[float, list[float]]:
    """Distances by a rule of all texts, or of the toys, by temperature."""
    return grouped(select(done, what=what), "temperature", name)


COURT = Item("court", cells, measure, show, 5, 20)
