"""Speeds of ways in turns: Table 2 (temperature), Figure 5 (context), and of the rebuttal those by
gammas and by drafter."""

from typing import Any

from minitri import Engine, SpeculationConfig
from minitri.core.requests import NO_SPECULATION
from minitri.core.settings import StepPlan
from tools.paper.baselines.datastore import Datastore
from tools.paper.baselines.policies import speculation_with
from tools.paper.baselines.skipped_layers import least_missed, with_layers
from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import (
    SPEEDUP,
    Columns,
    after,
    bars,
    curves,
    grid,
    grouped,
    means,
    select,
    spread,
    spreads,
    table,
)

FIRST = {"autoregressive": NO_SPECULATION}
"""Baseline of all speedups."""
BY_TEMPERATURE = {T: numbers for T, *numbers in PUBLISHED["table2"]["rows"]}
"""Published: speedup and acceptance of TriForce, and of the naive policy."""
ABLATIONS = PUBLISHED["table2"]["ablations"]
ABLATED_AT = 0.6
"""Temperature of the ablations."""
METHODS = ("triforce", "retrieval", "naive")
LENGTHS = [1 << n for n in range(13, 25)]
"""Contexts of the predicted curves: 8,192 to 16,777,216 tokens."""
OPEN = [StepPlan("triforce", g1, 1 << n) for g1 in range(1, 5) for n in range(2, 7)]
NAIVE = [StepPlan("naive", gamma1) for gamma1 in range(1, 17)]
CURVES = {"gammas 2 and 6": [PAPER], "best gammas": OPEN, "naive, best gamma": NAIVE}
BY_GAMMA = {name: dict(enumerate(them, 1)) for name, them in PUBLISHED["gammas"]["speedup"].items()}
"""Published speedups by one gamma; the other is usual."""
USUAL = {"gamma1": 2, "gamma2": 6}
BY_DRAFTER = PUBLISHED["drafters"]["speedup"]
KEPT = 0.68
"""Share of the layers, as of the KV cache in the rebuttal."""


def speed_texts(scale: Scale) -> list[Json]:
    """A cell for every text after which speed is measured."""
    return grid(text=range(scale.num_speed_texts))


def gain(cell: Done, way: str) -> float:
    """The speedup of a way."""
    return float(cell.values[way]["speedup"]["median"])


def gained(done: list[Done], name: str, way: str) -> dict[Any, list[float]]:
    """Speedups of a way, by a setting."""
    return grouped(done, name, way, "speedup", "median")


def accepted(done: list[Done], name: str, way: str) -> dict[Any, list[float]]:
    """Accepted / tested by the target, by a setting."""
    rates = grouped(done, name, way, "acceptance")
    return {it: [rate.get("target", 0.0) for rate in them] for it, them in rates.items()}


def measure_temperature(lab: Lab, settings: Json) -> Json:
    """TriForce and the naive policy; at one temperature the ablations, too."""
    temperature = settings["temperature"]
    ways = FIRST | {name: lab.speculation(name) for name in ("triforce", "naive")}
    if temperature == ABLATED_AT:
        streaming = speculation_with("streaming", lab.speculation("triforce"))
        ways |= dict(zip(ABLATIONS, (lab.speculation("retrieval"), streaming), strict=True))
    return lab.speeds(settings["text"], ways, temperature=temperature)


def show_temperatures(done: list[Done], scale: Scale) -> Shown:
    places = {"triforce": 0, "naive": 2}
    gains, rates = (
        {way: numbers(done, "temperature", way) for way in places} for numbers in (gained, accepted)
    )
    columns: Columns = {"T": "{:g}".format}
    for way, n in places.items():
        columns |= spreads({f"{way}, speedup": gains[way], f"{way}, accepted": rates[way]})
        paper = {T: "{} ({})".format(*it[n:]) for T, it in BY_TEMPERATURE.items()}
        columns |= {f"{way}, paper": paper.__getitem__}
    note = f"Speedup over autoregressive decoding after {scale.context:,} tokens, median and range "
    note += "over texts; accepted / tested by the target."
    ablated = select(done, temperature=ABLATED_AT)
    by_ablation = {
        name: {it: numbers(ablated, "temperature", it)[ABLATED_AT] for it in ABLATIONS}
        for name, numbers in (("speedup", gained), ("accepted", accepted))
    }
    others: Columns = {f"T = {ABLATED_AT}": str} | spreads(by_ablation)
    others |= {"paper": lambda it: "{} ({})".format(*ABLATIONS[it])}
    here = {way: means(gains[way]) for way in places}
    parts = (f"{way} {min(it.values()):.2f} to {max(it.values()):.2f}" for way, it in here.items())
    lowest = min(map(min, rates["triforce"].values()))
    verdict = f"Speedups over all temperatures: {', '.join(parts)}. The target accepts "
    verdict += f"{lowest:.2f} or more of TriForce's guesses after every text: that this is about "
    verdict += f"0.9 at every temperature {'holds' if lowest > 0.85 else 'does not hold'}."
    published = {way: {T: it[n] for T, it in BY_TEMPERATURE.items()} for way, n in places.items()}
    draw = curves({"here": here, "paper": published}, xlabel="temperature", **SPEEDUP)
    tables = [table(gains["triforce"], columns, note), table(ABLATIONS, others)]
    return Shown(tables, verdict, draw)


def measure_context(lab: Lab, settings: Json) -> Json:
    """All methods after a text of a length; half of it is the largest budget."""
    budget = min(lab.scale.budget, settings["context"] // 16 * 8)
    ways = FIRST | {name: lab.speculation(name, budget=budget) for name in METHODS}
    return lab.speeds(0, ways, context=settings["context"])


def show_contexts(done: list[Done], scale: Scale) -> Shown:
    gains = {name: gained(done, "context", name) for name in METHODS}
    own = {name: means(it) for name, it in gains.items()}
    alone = grouped(done, "context", "autoregressive", "ms_per_token", "median")
    columns: Columns = {"context, tokens": "{:,}".format}
    columns |= spreads({"autoregressive, ms/token": alone}, 1) | spreads(gains)
    note = f"Speedups, one text, T = 0.6, top-p 0.9, {scale.new_tokens} tokens, budget of "
    note += f"{scale.budget:,} tokens or half of the context."
    if scale.stretched:
        note += f" Beyond {scale.trained_context:,} tokens the model is stretched."
    predicted = {
        name: {length: speedup(on_chip(length), plans) for length in LENGTHS}
        for name, plans in CURVES.items()
    }
    lines = [[f"{n:,}", *(f"{it[n]:.2f}" for it in predicted.values())] for n in LENGTHS]
    rate, naive = RATES["retrieval"], RATES["draft"]
    more = "7B on an A100 with the paper's acceptance at T = 0, by bytes over bandwidth, as if the "
    more += f"KV cache fitted: {speedup(on_chip(122_880), [PAPER]):.2f} after 122,880 tokens, "
    more += "where 2.31 was published. Bounds, for guesses that cost nothing and blocks without "
    more += f"limit: 1 / (1 - {rate}) = {bound(rate):.2f}, naive {bound(naive):.2f}."
    short, long = min(alone), max(alone)
    cascade = own["triforce"]
    most = max(cascade.values())
    grows = "grows" if cascade[long] == most else "does not grow steadily"
    verdict = f"The speedup {grows} here, from {cascade[short]:.2f} after {short:,} tokens to "
    verdict += f"{cascade[long]:.2f} after {long:,}; the most is {most:.2f}. The paper's 13.1 is "
    verdict += "the bound for guesses that cost nothing and blocks without limit; with gammas 2 "
    verdict += f"and 6 {predicted['gammas 2 and 6'][LENGTHS[-1]]:.1f} are predicted at most."
    predicted["bound"] = dict.fromkeys(LENGTHS, bound(rate))
    axes = SPEEDUP | {"xlabel": "context, tokens", "xscale": "log"}
    draw = curves({"here": own, "A100, predicted": predicted}, **axes)
    tables = [table(alone, columns, note), Table(["predicted, tokens", *CURVES], lines, more)]
    return Shown(tables, verdict, draw)


def ways_by_gamma(name: str) -> dict[int, dict[str, int]]:
    """Both gammas of every way where this one changes; the usual way is among those of each."""
    return {gamma: USUAL | {name: gamma} for gamma in BY_GAMMA[name]}


def measure_gammas(lab: Lab, settings: Json) -> Json:
    """All pairs of gammas, each once."""
    pairs = [pair for name in BY_GAMMA for pair in ways_by_gamma(name).values()]
    ways = {str(pair): lab.speculation("triforce", **pair) for pair in pairs}
    return lab.speeds(settings["text"], FIRST | ways)


def show_gammas(done: list[Done], scale: Scale) -> Shown:
    note = f"Over autoregressive decoding, all in turns. {after(scale)}"
    tables, verdicts, here = [], [], dict[str, dict[int, float]]()
    for name, paper in BY_GAMMA.items():
        gains = {
            gamma: [gain(it, str(pair)) for it in done]
            for gamma, pair in ways_by_gamma(name).items()
        }
        rows = [[str(it), spread(gains[it]), f"{paper[it]:.2f}"] for it in paper]
        tables.append(Table([name, "speedup", "paper"], rows, note))
        own = here[name] = means(gains)
        best, usual = max(own, key=own.__getitem__), USUAL[name]
        verdicts.append(f"{name} = {best} is fastest here ({own[best]:.2f}; {usual}: ")
        verdicts[-1] += f"{own[usual]:.2f})"
    verdict = f"{' and '.join(verdicts)}: what decides is how dear a guess is next to a pass of the"
    verdict += " target, and how often it is accepted."
    draw = curves({"here": here, "paper": BY_GAMMA}, xlabel="gamma", **SPEEDUP)
    return Shown(tables, verdict, draw)


def measure_drafter(lab: Lab, settings: Json) -> Json:
    """A drafter after a text; gammas of the baselines are chosen before every step."""
    text, name = settings["text"], settings["drafter"]
    if name == "TriForce":
        return lab.speeds(text, FIRST | {name: lab.speculation("triforce")})
    engine = lab.engine(lab.scale.context)
    others = lab.other_texts(text, engine)
    guesser: Json
    if name == "REST":
        guesser = {"drafter": Datastore(others, engine.tokenizer.num_tokens)}
    else:
        layers = least_missed(engine.model, others[0], KEPT)
        guesser = {"draft": with_layers(engine.model, layers)}
    with Engine(engine.model, engine.tokenizer, **guesser) as own:
        return lab.speeds(text, FIRST | {name: SpeculationConfig("naive")}, engine=own)


def show_drafters(done: list[Done], scale: Scale) -> Shown:
    own = [Done(it.settings, {"own": it.values[it.settings["drafter"]]}) for it in done]
    gains, rates = (numbers(own, "drafter", "own") for numbers in (gained, accepted))
    tokens = grouped(own, "drafter", "own", "tokens_per_step")
    columns: Columns = {"drafter": str} | spreads({"speedup": gains})
    columns |= {"paper": lambda it: f"{BY_DRAFTER[it]:.2f}"}
    columns |= spreads({"accepted by the target": rates, "tokens per step": tokens})
    note = f"Over autoregressive decoding. {after(scale)} REST looks words up in the other texts; "
    note += f"skipped layers leave {KEPT:.0%} of them, chosen on another text, with a window of "
    note += "the latest tokens as their cache."
    here = means(gains)
    best = max(here, key=here.__getitem__)
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in here.items())
    verdict = f"{best} is fastest here, {'as' if best == 'TriForce' else 'not as'} in the "
    verdict += f"rebuttal: {listed}."
    draw = bars({"here": here, "paper": BY_DRAFTER}, ylabel="speedup")
    return Shown([table(gains, columns, note)], verdict, draw)


TABLE2 = Item(
    "table2",
    lambda scale: grid(text=range(scale.num_speed_texts), temperature=scale.temperatures),
    measure_temperature,
    show_temperatures,
    5,
    60,
)
FIG5 = Item(
    "fig5", lambda scale: grid(context=scale.contexts), measure_context, show_contexts, 4, 10
)
GAMMAS = Item("gammas", speed_texts, measure_gammas, show_gammas, 2, 40)
DRAFTERS = Item(
    "drafters",
    lambda scale: grid(text=range(scale.num_speed_texts), drafter=BY_DRAFTER),
    measure_drafter,
    show_drafters,
    4,
    60,
)
