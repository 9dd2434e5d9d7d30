"""Speeds of ways in turns: Table 2 (temperature), Figure 5 (context), and of the rebuttal those by
gammas and by drafter."""

from collections.abc import Mapping
from typing import Any

from minitri import Engine, SpeculationConfig
from minitri.settings import StepPlan
from tools.paper.baselines.datastore import Datastore
from tools.paper.baselines.policies import speculation_with
from tools.paper.baselines.skipped_layers import least_missed, with_layers
from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.lab import Lab
from tools.paper.scale import Scale
from tools.paper.shapes import SPEEDUP, after, bars, curves, grid, grouped, means, spread, table

BY_TEMPERATURE = {T: numbers for T, *numbers in PUBLISHED["table2"]["rows"]}
"""Published: speedup and acceptance of TriForce, and of the naive policy."""
ABLATIONS = PUBLISHED["table2"]["ablations"]
ABLATED_AT = 0.6
"""Temperature of the ablations."""
METHODS = ("triforce", "retrieval", "naive")
LENGTHS = [1 << n for n in range(13, 25)]
"""Of the predicted curves: 8,192 to 16,777,216 tokens."""
OPEN = [StepPlan("triforce", g1, 1 << n) for g1 in range(1, 5) for n in range(2, 7)]
NAIVE = [StepPlan("naive", gamma1) for gamma1 in range(1, 17)]
CURVES = {"gammas 2 and 6": [PAPER], "best gammas": OPEN, "naive, best gamma": NAIVE}
BY_GAMMA = {name: dict(enumerate(them, 1)) for name, them in PUBLISHED["gammas"]["speedup"].items()}
"""Published speedups by one gamma; the other is usual."""
USUAL = {"gamma1": 2, "gamma2": 6}
BY_DRAFTER = PUBLISHED["drafters"]["speedup"]
KEPT = 0.68
"""Of the layers, as of the KV cache in the rebuttal."""


def speeds_after(
    lab: Lab, text: int, ways: Mapping[str, SpeculationConfig], context: int = 0, **settings: Any
) -> Json:
    """Autoregressive decoding and these ways in turns after a text of a length, or the scale's."""
    num_tokens = context or lab.scale.context
    prompt = lab.prompt(text, num_tokens, lab.engine(num_tokens))
    alone = {"autoregressive": SpeculationConfig("autoregressive")}
    return lab.speeds(prompt, alone | dict(ways), **settings)


def speed_texts(scale: Scale) -> list[Json]:
    """A cell for every text after which speed is measured."""
    return grid(text=range(scale.num_speed_texts))


def gain(values: Json, way: str) -> float:
    """The speedup of a way in a cell."""
    return float(values[way]["speedup"]["median"])


def accepted(values: Json, way: str) -> float:
    """Accepted / tested by the target."""
    return float(values[way]["acceptance"].get("target", 0))


def measure_temperature(lab: Lab, settings: Json) -> Json:
    """TriForce and the naive policy; at one temperature the ablations, too."""
    temperature = settings["temperature"]
    ways = {name: lab.speculation(name) for name in ("triforce", "naive")}
    if temperature == ABLATED_AT:
        streaming = speculation_with("streaming", lab.speculation("triforce"))
        ways |= dict(zip(ABLATIONS, (lab.speculation("retrieval"), streaming), strict=True))
    return speeds_after(lab, settings["text"], ways, temperature=temperature)


def show_temperatures(done: list[Done], scale: Scale) -> Shown:
    places = {"triforce": 0, "naive": 2}
    gains, rates = (
        {way: grouped(done, "temperature", number, way) for way in places}
        for number in (gain, accepted)
    )
    rows = []
    for T in gains["triforce"]:
        rows.append([f"{T:g}"])
        published = BY_TEMPERATURE.get(T, "----")
        for way, n in places.items():
            rows[-1] += [spread(gains[way][T]), spread(rates[way][T])]
            rows[-1].append(f"{published[n]} ({published[n + 1]})")
    columns = [
        "T",
        *(f"{it}, {what}" for it in places for what in ("speedup", "accepted", "paper")),
    ]
    note = f"Speedup over autoregressive decoding after {scale.context:,} tokens, median and range "
    note += "over texts; accepted / tested by the target."
    ablated = [it.values for it in done if it.settings["temperature"] == ABLATED_AT]
    others = {
        f"T = {ABLATED_AT}": "{}".format,
        "speedup": lambda it: spread(gain(values, it) for values in ablated),
        "accepted": lambda it: spread(accepted(values, it) for values in ablated),
        "paper": lambda it: "{} ({})".format(*ABLATIONS[it]),
    }
    lowest = min(map(min, rates["triforce"].values()))
    verdict = f"The target accepts {lowest:.2f} or more of TriForce's guesses after every text: "
    verdict += "that this is about 0.9 at every temperature "
    verdict += "holds." if lowest > 0.85 else "does not hold."
    here = {way: means(gains[way]) for way in places}
    paper = {way: {T: it[n] for T, it in BY_TEMPERATURE.items()} for way, n in places.items()}
    draw = curves({"here": here, "paper": paper}, xlabel="temperature", **SPEEDUP)
    return Shown([Table(columns, rows, note), table(ABLATIONS, others)], verdict, draw)


def measure_context(lab: Lab, settings: Json) -> Json:
    """All methods after a text of a length; half of it is the largest budget."""
    context = settings["context"]
    budget = min(lab.scale.budget, context // 16 * 8)
    ways = {name: lab.speculation(name, budget=budget) for name in METHODS}
    return speeds_after(lab, 0, ways, context)


def show_contexts(done: list[Done], scale: Scale) -> Shown:
    own = {name: means(grouped(done, "context", gain, name)) for name in METHODS}
    alone = grouped(done, "context", lambda it: it["autoregressive"]["ms_per_token"]["median"])
    columns = {
        "context, tokens": lambda it: f"{it:,}",
        "autoregressive, ms/token": lambda it: f"{alone[it][0]:.1f}",
    } | {name: lambda it, gains=gains: f"{gains[it]:.2f}" for name, gains in own.items()}
    note = f"Speedups, one text, T = 0.6, top-p 0.9, {scale.new_tokens} tokens, budget of "
    note += f"{scale.budget:,} tokens or half of the context."
    predicted = {
        name: {length: speedup(on_chip(length), plans) for length in LENGTHS}
        for name, plans in CURVES.items()
    }
    lines = [[f"{n:,}", *(f"{it[n]:.2f}" for it in predicted.values())] for n in LENGTHS]
    rate, naive = RATES["retrieval"], RATES["draft"]
    more = "7B on an A100 with the paper's acceptance at T = 0, by bytes over bandwidth, as if the "
    more += (
        f"KV cache fitted: {speedup(on_chip(122_880), [PAPER]):.2f} after 122,880 tokens, where "
    )
    more += "2.31 was published. Bounds, for guesses that cost nothing and blocks without limit: "
    more += f"1 / (1 - {rate}) = {bound(rate):.2f}, naive 1 / (1 - {naive}) = {bound(naive):.2f}."
    (short, first), *_, (long, last) = [*own["triforce"].items()] * 2
    verdict = f"The speedup {'grows' if last > first else 'does not grow'} here, from {first:.2f} "
    verdict += (
        f"after {short:,} tokens to {last:.2f} after {long:,}. The paper's 13.1 is the bound "
    )
    verdict += "for guesses that cost nothing and blocks without limit; with gammas 2 and 6 it is "
    verdict += f"{predicted['gammas 2 and 6'][LENGTHS[-1]]:.1f}."
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
    return speeds_after(lab, settings["text"], ways)


def show_gammas(done: list[Done], scale: Scale) -> Shown:
    note = f"Over autoregressive decoding, all in turns. {after(scale)}"
    tables, verdicts, here = [], [], dict[str, dict[int, float]]()
    for name, paper in BY_GAMMA.items():
        gains = {
            gamma: [gain(it.values, str(pair)) for it in done]
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
        return speeds_after(lab, text, {name: lab.speculation("triforce")})
    engine = lab.engine(lab.scale.context)
    others = other_texts(lab, text, engine)
    guessers: dict[str, Any]
    if name == "REST":
        guessers = {"drafter": Datastore(others, engine.tokenizer.num_tokens)}
    else:
        layers = least_missed(engine.model, others[0], KEPT)
        guessers = {"draft": with_layers(engine.model, layers)}
    with Engine(engine.model, engine.tokenizer, **guessers) as own:
        return speeds_after(lab, text, {name: SpeculationConfig("naive")}, engine=own)


def other_texts(lab: Lab, text: int, engine: Engine) -> list[list[int]]:
    """The tokens of all other texts; of a single one what comes after prompt and output."""
    own = lab.texts[text % len(lab.texts)]
    encode = engine.tokenizer.encode
    if others := [encode(it.content) for it in lab.texts if it is not own]:
        return others
    return [encode(own.content)[lab.scale.context + 2 * lab.scale.new_tokens :]]


def show_drafters(done: list[Done], scale: Scale) -> Shown:
    own = [Done(it.settings, it.values[it.settings["drafter"]]) for it in done]
    gains = grouped(own, "drafter", lambda it: it["speedup"]["median"])
    rates = grouped(own, "drafter", lambda it: it["acceptance"].get("target", 0.0))
    tokens = grouped(own, "drafter", lambda it: it["tokens_per_step"])
    columns = {
        "drafter": "{}".format,
        "speedup": lambda it: spread(gains[it]),
        "paper": lambda it: f"{BY_DRAFTER[it]:.2f}",
        "accepted by the target": lambda it: spread(rates[it]),
        "tokens per step": lambda it: spread(tokens[it]),
    }
    note = f"Over autoregressive decoding. {after(scale)} REST looks words up in the other texts; "
    note += (
        f"skipped layers leave {KEPT:.0%} of them, chosen on another text, with a window of the "
    )
    note += "latest tokens as their cache."
    here = means(gains)
    best = max(here, key=here.__getitem__)
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in here.items())
    verdict = f"{best} is fastest here, {'as' if best == 'TriForce' else 'not as'} in the "
    verdict += f"rebuttal: {listed}."
    draw = bars({"here": here, "paper": BY_DRAFTER}, ylabel="speedup")
    return Shown([table(gains, columns, note)], verdict, draw)


TABLE2 = Item.of(
    "table2",
    lambda scale: grid(text=range(scale.num_speed_texts), temperature=scale.temperatures),
    measure_temperature,
    show_temperatures,
    minutes=(5, 60),
)
FIG5 = Item.of(
    "fig5",
    lambda scale: grid(context=scale.contexts),
    measure_context,
    show_contexts,
    minutes=(4, 10),
)
GAMMAS = Item.of("gammas", speed_texts, measure_gammas, show_gammas, minutes=(2, 40))
DRAFTERS = Item.of(
    "drafters",
    lambda scale: grid(text=range(scale.num_speed_texts), drafter=BY_DRAFTER),
    measure_drafter,
    show_drafters,
    minutes=(4, 60),
)
