"""Rebuttal: speedup by the length of the output."""

import itertools
import statistics
from typing import Any

from minitri import GenerationConfig, Request, SpeculationConfig
from minitri.generation import Generation
from tools.paper.item import Done, Item, Json, Shown, Table, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TITLE = "Rebuttal: speedup by output length"
CLAIM = (
    "The speedup is 2.28 to 2.34 for outputs of 256 to 2,048 tokens, as the retrieval cache is "
    "rebuilt at intervals."
)
PUBLISHED = {256: 2.31, 512: 2.28, 768: 2.34, 1024: 2.32, 1536: 2.28, 2048: 2.29}
Row = list[float]
"""Tokens made, seconds, guesses tested and accepted."""


def lengths(scale: Scale) -> list[int]:
    """Of the outputs: the paper's, on a GPU one more, by a tiny model shorter ones."""
    if not scale.model:
        return [length * scale.new_tokens // 256 for length in PUBLISHED]
    return [*PUBLISHED] + [4096] * (scale.name == "gpu")


def cells(scale: Scale) -> list[Json]:
    """One long output after each text."""
    return [{"text": text} for text in range(scale.num_speed_texts)]


def measure(lab: Lab, settings: Json) -> Json:
    """A `Row` of both methods at every length; on a CPU they take turns from one to the next."""
    ends = lengths(lab.scale)
    engine = lab.engine(lab.scale.context + ends[-1])
    prompt = lab.prompt(settings["text"], lab.scale.context, engine)
    generation = GenerationConfig(ends[-1], ignore_eos=True)
    request = Request(prompt, 0, lab.sampling(0.6), generation)
    ways = {"autoregressive": SpeculationConfig("autoregressive")}
    ways["triforce"] = lab.speculation("triforce")
    lab.release()
    if engine.model.device.type == "cuda":  # which has memory for one KV cache
        groups = [{name: way} for name, way in ways.items()]
    else:
        groups = [ways]
    rows: Json = {name: [] for name in ways}
    for group in groups:
        runs = {
            name: engine.stream([request], generation=generation, speculation=way)
            for name, way in group.items()
        }
        for end, (name, run) in itertools.product(ends, runs.items()):
            rows[name].append(advance(run, end))
        for run in runs.values():
            run.close()
    return rows


def advance(run: Generation, num_tokens: int) -> Row:
    """Goes on to an output of so many tokens, to the end of the step that makes them."""
    stats = run.stats
    while stats.num_generated_tokens < num_tokens:
        next(run)
    target = stats.stages[-1]
    num_made = stats.steps_per_plan.total() + target.num_accepted_tokens
    counts = (target.num_tested_tokens, target.num_accepted_tokens)
    return [num_made, stats.decode_seconds, *counts]


def windows(rows: list[Row]) -> list[Row]:
    """What was added from one length to the next."""
    pairs = itertools.pairwise([[0.0] * len(rows[0]), *rows])
    return [[new - old for old, new in zip(a, b, strict=True)] for a, b in pairs]


def speedups(cell: Json) -> list[float]:
    """At every row seconds a token alone over those with guesses."""
    pairs = zip(cell["autoregressive"], cell["triforce"], strict=True)
    return [alone[1] / alone[0] * own[0] / own[1] for alone, own in pairs]


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every length."""
    ends = lengths(scale)
    parts = [{name: windows(rows) for name, rows in it.values.items()} for it in done]
    whole = [[*row] for row in zip(*(speedups(it.values) for it in done), strict=True)]
    late = zip(*map(speedups, parts), strict=True)
    rates = [*zip(*([row[3] / row[2] for row in it["triforce"]] for it in parts), strict=True)]
    rows = [
        [f"{end:,}", spread(gains), str(PUBLISHED.get(end, "-")), *map(spread, of_window)]
        for end, gains, *of_window in zip(ends, whole, late, rates, strict=True)
    ]
    columns = ["output, tokens", "speedup", "paper", "since the row above", "accepted since then"]
    note = f"After {scale.context:,} tokens, T = 0.6, top-p 0.9; median and range over texts."
    means = [statistics.mean(gains) for gains in whole]
    first, last = statistics.mean(rates[0]), statistics.mean(rates[-1])
    is_stable = min(means) > 0.9 * max(means)
    verdict = f"The speedup is {'' if is_stable else 'not '}stable: {means[0]:.2f} for {ends[0]:,} "
    verdict += f"tokens, {means[-1]:.2f} for {ends[-1]:,}; of the guesses {first:.2f} are accepted "
    verdict += f"in the first part and {last:.2f} in the last."
    if last > first + 0.05:
        verdict += " It gets easier to guess with its length, as a text does that repeats itself."

    def draw(axes: Any) -> None:
        axes.plot(ends, means, "o-", color="#009E73", label="here")
        axes.plot([*PUBLISHED], [*PUBLISHED.values()], ":", color="#009E73", label="paper")
        axes.set(xlabel="output, tokens", ylabel="speedup", ylim=(0, None))

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item("outputs", TITLE, CLAIM, cells, measure, show, minutes_here=4, minutes_gpu=45)
