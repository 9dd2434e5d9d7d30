"""Rebuttal: speedup by the length of the output."""

import itertools

from minitri import GenerationConfig, Request
from minitri.core.generation import Generation
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown
from tools.paper.items.speeds import FIRST, speed_texts
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import SPEEDUP, Columns, after, curves, means, spreads, table

PAPER: dict[int, float] = dict(PUBLISHED["outputs"]["rows"])
Row = list[float]
"""Tokens made, seconds, guesses tested and accepted."""


def lengths(scale: Scale) -> list[int]:
    """Lengths of the outputs: the paper's, on a GPU one more, by a tiny model shorter ones."""
    if not scale.model:
        return [length * scale.new_tokens // 256 for length in PAPER]
    return [*PAPER] + [4096] * (scale.name == "gpu")


def measure(lab: Lab, settings: Json) -> Json:
    """A `Row` of both methods at every length; on a CPU they take turns from one to the next."""
    ends = lengths(lab.scale)
    engine = lab.engine(lab.scale.context + ends[-1])
    prompt = lab.prompt(settings["text"], lab.scale.context, engine)
    generation = GenerationConfig(ends[-1], ignore_eos=True)
    request = Request(prompt, 0, lab.sampling(0.6), generation)
    ways = FIRST | {"triforce": lab.speculation("triforce")}
    lab.release()
    rows: Json = {name: [] for name in ways}
    is_gpu = engine.model.device.type == "cuda"  # which has memory for one KV cache
    for names in [[name] for name in ways] if is_gpu else [[*ways]]:
        runs = {
            name: engine.stream([request], generation=generation, speculation=ways[name])
            for name in names
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
    return [num_made, stats.decode_seconds, target.num_tested_tokens, target.num_accepted_tokens]


def windows(rows: list[Row]) -> list[Row]:
    """Differences of the counters from one length to the next."""
    pairs = itertools.pairwise([[0.0] * len(rows[0]), *rows])
    return [[new - old for old, new in zip(a, b, strict=True)] for a, b in pairs]


def speedups(cell: Json) -> list[float]:
    """At every row seconds a token alone over those with guesses."""
    pairs = zip(cell["autoregressive"], cell["triforce"], strict=True)
    return [alone[1] / alone[0] * own[0] / own[1] for alone, own in pairs]


def show(done: list[Done], scale: Scale) -> Shown:
    ends = lengths(scale)
    parts = [{name: windows(rows) for name, rows in it.values.items()} for it in done]
    gains, late, rates = (
        dict(zip(ends, zip(*of_texts, strict=True), strict=True))
        for of_texts in (
            (speedups(it.values) for it in done),
            map(speedups, parts),
            ([row[3] / row[2] for row in it["triforce"]] for it in parts),
        )
    )
    columns: Columns = {"output, tokens": "{:,}".format} | spreads({"speedup": gains})
    columns |= {"paper": lambda it: str(PAPER.get(it, "-"))}
    columns |= spreads({"since the row above": late, "accepted since then": rates})
    here, by_length = means(gains), [*means(rates).values()]
    is_stable = min(here.values()) > 0.9 * max(here.values())
    verdict = f"The speedup is {'' if is_stable else 'not '}stable: {here[ends[0]]:.2f} for "
    verdict += f"{ends[0]:,} tokens, {here[ends[-1]]:.2f} for {ends[-1]:,}; of the guesses "
    verdict += f"{by_length[0]:.2f} are accepted in the first part and {by_length[-1]:.2f} in the "
    verdict += "last."
    if by_length[-1] > by_length[0] + 0.05:
        verdict += " Later tokens are easier to guess, as of a text that repeats itself."
    lines = {"here": {"": here}, "paper": {"": PAPER}}
    draw = curves(lines, xlabel="output, tokens", **SPEEDUP)
    note = f"Over autoregressive decoding. {after(scale)}"
    return Shown([table(ends, columns, note)], verdict, draw)


OUTPUTS = Item("outputs", speed_texts, measure, show, 4, 45)
