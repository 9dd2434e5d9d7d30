"""Rebuttal: speedup by the length of the output."""

import itertools
from typing import Any

from minitri import GenerationConfig, PrefillProgress, Request, SpeculationConfig
from minitri.generation import Generation
from tools.paper.item import Done, Item, Json, Shown, Table, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

PUBLISHED = {256: 2.31, 512: 2.28, 768: 2.34, 1024: 2.32, 1536: 2.28, 2048: 2.29}


def lengths(scale: Scale) -> list[int]:
    """Of the outputs: the paper's, on a GPU one more, at tiny models shorter ones."""
    if not scale.model:
        return [length * scale.new_tokens // 256 for length in PUBLISHED]
    return [*PUBLISHED] + [4096] * (scale.name == "gpu")


def cells(scale: Scale) -> list[Json]:
    """One long output of each text."""
    return [{"text": text} for text in range(scale.num_speed_texts)]


def measure(lab: Lab, settings: Json) -> Json:
    """Of both methods a row of tokens made, seconds, guesses tested and accepted, at every length:
    the two take turns from one length to the next."""
    ends = lengths(lab.scale)
    context = lab.scale.context
    engine = lab.engine(context + ends[-1])
    prompt = lab.prompt(settings["text"], context, engine)
    generation = GenerationConfig(ends[-1], ignore_eos=True)
    request = Request(prompt, 0, lab.sampling(0.6), generation)
    ways = [SpeculationConfig("autoregressive"), lab.speculation("triforce")]
    runs = [engine.stream([request], generation=generation, speculation=way) for way in ways]
    for run in runs:
        while isinstance(next(run), PrefillProgress):
            pass
    rows: list[list[list[float]]] = [[], []]
    for end in ends:
        for run, own in zip(runs, rows, strict=True):
            own.append(advance(run, end))
    for run in runs:
        run.close()
    return dict(zip(("autoregressive", "triforce"), rows, strict=True))


def advance(run: Generation, num_tokens: int) -> list[float]:
    """Goes on to so many tokens; gives tokens, seconds, tested and accepted guesses until then, in
    whole steps."""
    stats = run.stats
    for _ in run:
        if stats.num_generated_tokens >= num_tokens:
            break
    target = stats.stages[-1]
    num_made = stats.steps_per_plan.total() + target.num_accepted_tokens
    counts = (target.num_tested_tokens, target.num_accepted_tokens)
    return [num_made, stats.decode_seconds, *counts]


def windows(rows: list[list[float]]) -> list[list[float]]:
    """What was added from one length to the next."""
    pairs = itertools.pairwise([[0.0] * len(rows[0]), *rows])
    return [[new - old for old, new in zip(a, b, strict=True)] for a, b in pairs]


def speedups(cell: Json) -> list[float]:
    """By row: seconds a token alone over those with guesses."""
    pairs = zip(cell["autoregressive"], cell["triforce"], strict=True)
    return [alone[1] / alone[0] * own[0] / own[1] for alone, own in pairs]


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every length."""
    ends = lengths(scale)
    whole = [speedups(it.values) for it in done]
    parts = [{name: windows(rows) for name, rows in it.values.items()} for it in done]
    late = [speedups(it) for it in parts]
    rates = [[row[3] / max(row[2], 1) for row in it["triforce"]] for it in parts]
    starts = [0, *ends[:-1]]
    rows = [
        [
            f"{end:,}",
            spread(it[i] for it in whole),
            f"{PUBLISHED[end]:.2f}" if end in PUBLISHED else "-",
            f"{start:,} to {end:,}",
            spread(it[i] for it in late),
            spread(it[i] for it in rates),
        ]
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    columns = ["output, tokens", "speedup", "paper", "window", "speedup in it", "accepted in it"]
    note = f"After {scale.context:,} tokens, T = 0.6, top-p 0.9; median and range over texts; "
    note += "both methods in turns, window by window."
    means = [sum(column) / len(done) for column in zip(*whole, strict=True)]
    ratio = min(means) / max(means)
    verdict = f"The speedup {'is stable' if ratio > 0.9 else 'is not stable'} over the output: "
    verdict += f"{means[0]:.2f} after {ends[0]:,} tokens and {means[-1]:.2f} after {ends[-1]:,} "
    verdict += f"({min(means):.2f} to {max(means):.2f}); the cache is rebuilt every 256 tokens."

    def draw(axes: Any) -> None:
        axes.plot(ends, means, "o-", color="#009E73", label="here")
        axes.plot([*PUBLISHED], [*PUBLISHED.values()], ":", color="#009E73", label="paper")
        axes.set(xlabel="output, tokens", ylabel="speedup", ylim=(0, None))

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "outputs",
    "Rebuttal: speedup by output length",
    "The speedup is 2.28 to 2.34 for outputs of 256 to 2,048 tokens, as the retrieval cache is "
    "rebuilt at intervals.",
    cells,
    measure,
    show,
    minutes_here=3,
    minutes_gpu=45,
)
