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
from tools.paper.items.speeds import gain, speeds_after
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import curves, distinct, grid, grouped, means, select, spread, table

TEMPERATURES = ("0", "1")
"""Of Figure 2a."""
NUM_SINKS = 4
WAYS = ("StreamingLLM", "StreamingLLM, 4 x as wide", "sliding window, re-computed")
NUM_WHOLE = 2
"""First layers that attend to the whole text in Figure 3b and Table 1."""
POLICIES = {"topk": "Top-K", "streaming": "StreamingLLM", "h2o": "H2O"}
LARGEST = 1024
"""Of the sizes of chunks that a `SpeculationConfig` takes."""
TIE = 0.005
"""Acceptance that counts as no difference."""
AXES: Json = {"xscale": "log", "ylabel": "accepted / tested"}


def few_texts(scale: Scale) -> range:
    """For what takes long."""
    return range(min(scale.num_texts, 2 if scale.name == "cpu" else 5))


def window(scale: Scale) -> int:
    """Tokens that the drafter reads, the sinks included: 256 as in the paper, but after the tiny
    texts."""
    return min(256, scale.long_context // 16)


def measure_divergence(lab: Lab, settings: Json) -> Json:
    """1 - acceptance by temperature and kind of window. All lengths meet the same model, which is
    stretched for the longest."""
    options = {"rope_scaling": lab.scale.rope_scaling} if lab.scale.rope_scaling else {}
    gamma, width = lab.scale.gamma1, window(lab.scale)
    values: Json = {}
    for temperature in TEMPERATURES:
        said = lab.continuation(
            settings["text"], settings["context"], float(temperature), **options
        )
        models = lab.engine(settings["context"], **options).models
        drafter = models.draft or models.target
        guesses = (
            said.by_drafter(drafter, gamma, width - NUM_SINKS),
            said.by_drafter(drafter, gamma, 4 * width - NUM_SINKS),
            said.by_window(drafter, width),
        )
        rates = (1 - said.rate(probs_NV, gamma).mean for probs_NV in guesses)
        values[temperature] = dict(zip(WAYS, rates, strict=True))
    return values


def show_divergence(done: list[Done], scale: Scale) -> Shown:
    found = {
        (T, way): grouped(done, "context", lambda it, T, way: it[T][way], T, way)
        for T, way in itertools.product(TEMPERATURES, WAYS)
    }
    contexts = distinct(done, "context")
    rows = [[f"{n:,}", *(spread(column[n]) for column in found.values())] for n in contexts]
    columns = ["tokens", *(f"T = {T}, {way}" for T, way in found)]
    note = f"1 - accepted / tested, gamma1 = {scale.gamma1}; window of {window(scale)} tokens; "
    note += "median and range over texts. The model is stretched for the longest text throughout."
    here = {f"T = {T}": {way: means(found[T, way]) for way in WAYS} for T in TEMPERATURES}
    short, long = contexts[0], contexts[-1]
    streaming = {T: ways[WAYS[0]] for T, ways in here.items()}
    parts = (f"{it[short]:.2f} to {it[long]:.2f} at {T}" for T, it in streaming.items())
    verdict = f"From {short:,} to {long:,} tokens the divergence of the drafter with StreamingLLM "
    verdict += f"cache goes from {', '.join(parts)}: it "
    if all(it[long] > it[short] + 0.05 for it in streaming.values()):
        verdict += "rises with the length, as in the paper."
    else:
        verdict += "does not rise much, as the next words of these texts depend on what was last "
        verdict += "said, and the drafter was made for this target."
    axes = AXES | {"xlabel": "text, tokens", "ylabel": "1 - accepted / tested", "ylim": (0, 1)}
    return Shown([Table(columns, rows, note)], verdict, curves(here, **axes))


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance with a retrieval cache of these settings; by a policy that is named
    with the first layers whole. Or the speeds by budget."""
    if settings.get("what") == "speed":
        budgets = {str(it): lab.speculation("triforce", budget=it) for it in lab.scale.budgets}
        return speeds_after(lab, settings["text"], budgets)
    gamma = lab.scale.gamma2
    said = lab.continuation(settings["text"], lab.scale.context)
    policy = settings.get("policy", "retrieval")
    usual = {it: settings[it] for it in ("budget", "chunk_size") if it in settings}
    speculation = lab.speculation("retrieval", **usual)
    [probs_NV] = by_policy(said, policy, speculation, [NUM_WHOLE if "policy" in settings else 0])
    return said.rate(probs_NV, gamma)._asdict()


def by_policy(
    said: Continuation, policy: str, speculation: SpeculationConfig, nums_whole: Iterable[int]
) -> list[Tensor]:
    """Distributions (N, V) of guesses by a policy, with so many of the first layers whole."""
    gamma, most = speculation.gamma2 or 1, said.model.config.num_layers // 2
    nums_whole = [min(it, most) for it in nums_whole]
    if policy == "topk":
        return [
            said.by_top_tokens(speculation.budget_for(said.num_prompt), gamma, it)
            for it in nums_whole
        ]
    models = [first_layers_whole(said.model, said.full, it) for it in nums_whole]
    return said.by_cache(speculation_with(policy, speculation), gamma, *models)


def mean_rate(values: Json) -> float:
    """Of a cell."""
    return float(values["mean"])


def show_policies(done: list[Done], scale: Scale) -> Shown:
    found = {
        policy: grouped([it for it in done if it.settings["policy"] == policy], "budget", mean_rate)
        for policy in distinct(done, "policy")
    }
    budgets = distinct(done, "budget")
    rows = [[f"{it:,}", f"{100 * it / scale.context:.1f}"] for it in budgets]
    for row, budget in zip(rows, budgets, strict=True):
        row += [spread(rates.get(budget, ()), 3) for rates in found.values()]
    paper = PUBLISHED["fig3b"]["with_1024_tokens"]
    rows.append(["paper: 1,024", "0.8", *(paper[policy] for policy in found)])
    note = "Accepted / tested, medians and ranges over texts; T = 0.6, top-p 0.9; the first two "
    note += "layers attend to the whole text."
    columns = ["budget, tokens", "% of the text", *(POLICIES[policy] for policy in found)]
    here = {POLICIES[policy]: means(row) for policy, row in found.items()}
    parts = (
        f"{name} {min(row.values()):.3f} to {max(row.values()):.3f}" for name, row in here.items()
    )
    verdict = f"From {budgets[0]:,} to {budgets[-1]:,} tokens: {', '.join(parts)}. "
    if all(max(row.values()) > 0.9 for row in here.values()):
        verdict += "A small part of the cache is enough for a high acceptance, by all policies."
    else:
        verdict += "Not all policies come above 0.9 with these budgets."
    draw = curves({"": here}, **AXES, xlabel="budget, tokens", ylim=(None, 1))
    return Shown([Table(columns, rows, note)], verdict, draw)


def cells_of_budgets(scale: Scale) -> list[Json]:
    """Acceptance for every text and budget; speed for a text."""
    texts = range(min(scale.num_texts, 10))
    rates = grid(what=["rate"], text=texts, budget=scale.budgets)
    return rates + grid(what=["speed"], text=range(scale.num_speed_texts))


def show_budgets(done: list[Done], scale: Scale) -> Shown:
    rates = grouped(done, "budget", mean_rate)
    speeds = select(done, what="speed")
    gains = {budget: [gain(it, str(budget)) for it in speeds] for budget in rates}
    columns = {
        "budget, tokens": "{:,}".format,
        "% of the text": lambda it: f"{100 * it / scale.context:.1f}",
        "accepted": lambda it: spread(rates[it], 3),
        "speedup": lambda it: spread(gains[it]),
    }
    note = "Medians and ranges over texts; T = 0.6, top-p 0.9."
    here = means(rates)
    numbers = [*here.values()]
    rises = all(a <= b + TIE for a, b in itertools.pairwise(numbers))
    fastest = max(gains, key=lambda it: sum(gains[it]))
    verdict = f"Acceptance {'rises' if rises else 'does not always rise'} with the budget, from "
    verdict += f"{numbers[0]:.3f} to {numbers[-1]:.3f}, by ever less; {fastest:,} tokens are "
    verdict += "fastest here, where attention takes a smaller share of the time than after 122,880 "
    verdict += "tokens."
    knee = {PUBLISHED["fig6a"]["knee"]: max(numbers)}
    lines = {"": {"here": here}, "knee in the paper": {"": knee}}
    draw = curves(lines, **AXES, xlabel="budget, tokens")
    return Shown([table(rates, columns, note)], verdict, draw)


def cells_of_chunks(scale: Scale) -> list[Json]:
    """Every text with every size, up to two chunks in the whole budget."""
    largest = min(scale.budget // 2, LARGEST)
    sizes = [1 << n for n in range(largest.bit_length())]
    return grid(text=range(min(scale.num_texts, 10)), chunk_size=sizes)


def show_chunks(done: list[Done], scale: Scale) -> Shown:
    rates = grouped(done, "chunk_size", mean_rate)
    columns = {
        "chunk, tokens": "{:,}".format,
        "chunks in the budget": lambda it: f"{scale.budget // it:,}",
        "accepted": lambda it: spread(rates[it], 3),
    }
    note = f"Accepted / tested with a budget of {scale.budget:,} tokens after {scale.context:,}; "
    note += "medians and ranges over texts, T = 0.6, top-p 0.9. All sizes meet the same tokens."
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


FIG2A = Item.of(
    "fig2a",
    lambda scale: grid(text=few_texts(scale), context=scale.contexts),
    measure_divergence,
    show_divergence,
    minutes=(9, 17),
)
FIG3B = Item.of(
    "fig3b",
    lambda scale: grid(text=few_texts(scale), policy=POLICIES, budget=scale.budgets),
    measure,
    show_policies,
    minutes=(6, 50),
)
FIG6A = Item.of("fig6a", cells_of_budgets, measure, show_budgets, minutes=(3, 30))
FIG6B = Item.of("fig6b", cells_of_chunks, measure, show_chunks, minutes=(2, 20))
