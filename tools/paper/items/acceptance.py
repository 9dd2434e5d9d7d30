"""Expected acceptance of guesses that are held against one continuation: of a drafter by the text's
length (Figure 2a), and with a small cache by policy (3b), budget (6a) and size of chunks (6b)."""

import itertools
from collections.abc import Iterable

from torch import Tensor

from minitri import SpeculationConfig
from tools.paper.baselines.bounds import first_layers_whole
from tools.paper.baselines.policies import speculation_with
from tools.paper.continuation import Continuation
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.items.speeds import BY_TEMPERATURE, FIRST, gain
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import (
    Columns,
    after,
    curves,
    grid,
    grouped,
    means,
    select,
    spreads,
    table,
)

TEMPERATURES = ("0", "1")
"""Temperatures of Figure 2a."""
NUM_SINKS = 4
WAYS = ("StreamingLLM", "StreamingLLM, 4 x as wide", "sliding window, re-computed")
NUM_WHOLE = 2
"""First layers that attend to the whole text in Figure 3b and Table 1."""
POLICIES = {"topk": "Top-K", "streaming": "StreamingLLM", "h2o": "H2O"}
LARGEST = 1024
"""Largest size of chunks that a `SpeculationConfig` takes."""
HIGH = 0.9
"""An acceptance; the paper's policies are above it in Figure 3b."""
TIE = 0.005
"""Acceptance that counts as no difference."""
AXES: Json = {"xscale": "log", "ylabel": "accepted / tested"}


def few_texts(scale: Scale) -> range:
    """Fewer texts, for cells that take long."""
    return range(min(scale.num_texts, 2 if scale.name == "cpu" else 5))


def window(scale: Scale) -> int:
    """Tokens that the drafter reads, sinks included: 256, but for tiny texts."""
    return min(256, scale.long_context // 16)


def measure_divergence(lab: Lab, settings: Json) -> Json:
    """1 - acceptance by temperature and kind of window; all lengths meet the same model."""
    gamma, width = lab.scale.gamma1, window(lab.scale)
    place = (settings["text"], settings["context"])
    values: Json = {}
    for T in TEMPERATURES:
        said = lab.continuation(*place, float(T), **lab.scale.stretched)
        guesses = (
            said.by_drafter(said.drafter, gamma, width - NUM_SINKS),
            said.by_drafter(said.drafter, gamma, 4 * width - NUM_SINKS),
            said.by_window(said.drafter, width),
        )
        rates = (1 - said.rate(probs_NV, gamma).mean for probs_NV in guesses)
        values[T] = dict(zip(WAYS, rates, strict=True))
    return values


def show_divergence(done: list[Done], scale: Scale) -> Shown:
    found = {
        T: {f"T = {T}, {way}": grouped(done, "context", T, way) for way in WAYS}
        for T in TEMPERATURES
    }
    columns: Columns = {"tokens": "{:,}".format} | spreads(found["0"] | found["1"])
    note = f"1 - accepted / tested, gamma1 = {scale.gamma1}; window of {window(scale)} tokens; "
    note += "top-p 0.9 at T = 1; median and range over texts. The model is stretched for the "
    note += "longest text throughout."
    here = {
        f"T = {T}": {way: means(it) for way, it in zip(WAYS, ways.values(), strict=True)}
        for T, ways in found.items()
    }
    streaming = {T: ways[WAYS[0]] for T, ways in here.items()}
    contexts = [*streaming["T = 0"]]
    short, long = contexts[0], contexts[-1]
    parts = (f"{it[short]:.2f} to {it[long]:.2f} at {T}" for T, it in streaming.items())
    rises = all(it[long] > it[short] + 0.05 for it in streaming.values())
    cold, warm = (sum(it.values()) for it in streaming.values())
    verdict = f"From {short:,} to {long:,} tokens the divergence of the drafter with StreamingLLM "
    verdict += f"cache goes from {', '.join(parts)}: it "
    verdict += "rises with the length, as in the paper" if rises else "does not rise much here"
    verdict += f", and is {'larger' if warm > cold else 'not larger'} at the higher temperature."
    axes = AXES | {"xlabel": "text, tokens", "ylabel": "1 - accepted / tested", "ylim": (0, 1)}
    return Shown([table(contexts, columns, note)], verdict, curves(here, **axes))


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance with a retrieval cache of these settings, where a policy is named
    with the first layers whole; or the speeds by budget."""
    if settings.get("what") == "speed":
        budgets = {str(it): lab.speculation("triforce", budget=it) for it in lab.scale.budgets}
        return lab.speeds(settings["text"], FIRST | budgets)
    said = lab.continuation(settings["text"], lab.scale.context)
    usual = {it: settings[it] for it in ("budget", "chunk_size") if it in settings}
    speculation = lab.speculation("retrieval", **usual)
    num_whole = NUM_WHOLE if "policy" in settings else 0
    [probs_NV] = by_policy(said, settings.get("policy", "retrieval"), speculation, [num_whole])
    return said.rate(probs_NV, lab.scale.gamma2)._asdict()


def by_policy(
    said: Continuation, policy: str, speculation: SpeculationConfig, nums_whole: Iterable[int]
) -> list[Tensor]:
    """Distributions (N, V) of guesses by a policy, with so many of the first layers whole."""
    gamma = speculation.gamma2 or 1
    nums_whole = [min(it, said.model.config.num_layers // 2) for it in nums_whole]
    if policy == "topk":
        budget = speculation.budget_for(said.num_prompt)
        return [said.by_top_tokens(budget, gamma, it) for it in nums_whole]
    models = [first_layers_whole(said.model, said.full, it) for it in nums_whole]
    return said.by_cache(speculation_with(policy, speculation), gamma, *models)


def columns_of_budgets(scale: Scale) -> Columns:
    """Description of the rows, for the notes."""
    percent: Columns = {"% of the text": lambda it: f"{100 * it / scale.context:.1f}"}
    return {"budget, tokens": "{:,}".format} | percent


def show_policies(done: list[Done], scale: Scale) -> Shown:
    found = {POLICIES[it]: grouped(select(done, policy=it), "budget", "mean") for it in POLICIES}
    here = {name: means(rates) for name, rates in found.items()}
    budgets = [*here["Top-K"]]
    note = "Accepted / tested, medians and ranges over texts; T = 0.6, top-p 0.9; the first two "
    note += "layers attend to the whole text."
    shown = table(budgets, columns_of_budgets(scale) | spreads(found, 3), note)
    paper = PUBLISHED["fig3b"]["with_1024_tokens"]
    rows = [*shown.rows, ["paper: 1,024", "0.8", *(paper[policy] for policy in POLICIES)]]
    ends = (budgets[0], budgets[-1])
    parts = (f"{name} {' to '.join(f'{it[n]:.3f}' for n in ends)}" for name, it in here.items())
    verdict = f"From {ends[0]:,} to {ends[1]:,} tokens: {', '.join(parts)}. "
    enough = [n for n in budgets if all(it[n] > HIGH for it in here.values())]
    if enough:
        verdict += f"{enough[0]:,} tokens, {enough[0] / scale.context:.1%} of the text, are enough "
        verdict += f"for more than {HIGH} by all policies."
    else:
        verdict += f"Not all policies come above {HIGH} with these budgets."
    draw = curves({"": here}, **AXES, xlabel="budget, tokens", ylim=(None, 1))
    return Shown([Table(shown.columns, rows, note)], verdict, draw)


def cells_of_budgets(scale: Scale) -> list[Json]:
    """Acceptance for every text and budget; speed for a text."""
    texts = range(min(scale.num_texts, 10))
    rates = grid(what=["rate"], text=texts, budget=scale.budgets)
    return rates + grid(what=["speed"], text=range(scale.num_speed_texts))


def show_budgets(done: list[Done], scale: Scale) -> Shown:
    rates = grouped(done, "budget", "mean")
    speeds = select(done, what="speed")
    gains = {budget: [gain(it, str(budget)) for it in speeds] for budget in rates}
    columns = columns_of_budgets(scale) | spreads({"accepted": rates}, 3)
    columns |= spreads({"speedup": gains})
    here = means(rates)
    numbers = [*here.values()]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    fastest = max(gains, key=lambda it: sum(gains[it]))
    verdict = f"Acceptance {'rises' if min(steps) >= -TIE else 'does not always rise'} with the "
    verdict += f"budget, from {numbers[0]:.3f} to {numbers[-1]:.3f}: the first doubling adds "
    verdict += f"{steps[0]:.3f}, the last {steps[-1]:.3f}. {fastest:,} tokens are fastest here, "
    verdict += f"{fastest / scale.context:.1%} of the text; in the paper it is 3.3%."
    paper = {PUBLISHED["fig6a"]["fastest"]: BY_TEMPERATURE[0.6][1]}
    draw = curves({"here": {"": here}, "paper": {"": paper}}, **AXES, xlabel="budget, tokens")
    return Shown([table(rates, columns, after(scale))], verdict, draw)


def cells_of_chunks(scale: Scale) -> list[Json]:
    """Every text with every size, up to two chunks in the whole budget."""
    largest = min(scale.budget // 2, LARGEST)
    sizes = [1 << n for n in range(largest.bit_length())]
    return grid(text=range(min(scale.num_texts, 10)), chunk_size=sizes)


def show_chunks(done: list[Done], scale: Scale) -> Shown:
    rates = grouped(done, "chunk_size", "mean")
    columns: Columns = {"chunk, tokens": "{:,}".format}
    columns |= {"chunks in the budget": lambda it: f"{scale.budget // it:,}"}
    columns |= spreads({"accepted": rates}, 3)
    note = f"Accepted / tested with a budget of {scale.budget:,} tokens after {scale.context:,}; "
    note += "medians and ranges over texts, T = 0.6, top-p 0.9. All sizes meet the same tokens; "
    note += "the chunks of the sinks and of the latest tokens, up to a quarter, are always kept."
    here = means(rates)
    best = max(here, key=here.__getitem__)
    ends = {"small": min(here), "large": max(here)}
    listed = ", ".join(f"{here[it]:.3f} by {it}" for it in sorted({*ends.values(), best}))
    parts = (
        f"too {name} ones are {'' if here[best] - here[size] > TIE else 'not '}worse"
        for name, size in ends.items()
    )
    verdict = f"By the tokens of a chunk {listed} are accepted: {' and '.join(parts)} here."
    draw = curves({"": {"here": here}}, **AXES, xlabel="chunk size, tokens")
    return Shown([table(rates, columns, note)], verdict, draw)


FIG2A = Item(
    "fig2a",
    lambda scale: grid(text=few_texts(scale), context=scale.contexts),
    measure_divergence,
    show_divergence,
    9,
    17,
)
FIG3B = Item(
    "fig3b",
    lambda scale: grid(text=few_texts(scale), policy=POLICIES, budget=scale.budgets),
    measure,
    show_policies,
    6,
    50,
)
FIG6A = Item("fig6a", cells_of_budgets, measure, show_budgets, 3, 30)
FIG6B = Item("fig6b", cells_of_chunks, measure, show_chunks, 2, 20)
