"""Figure 2a: how far a drafter with a small window is from the target, over the text's length."""

from typing import Any

from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.scale import Scale

TEMPERATURES = (0.0, 1.0)
NUM_SINKS = 4
WAYS = ("StreamingLLM", "StreamingLLM, 4 x as wide", "sliding window, re-computed")
COLORS = dict(zip(WAYS, ("#0072B2", "#56B4E9", "#D55E00"), strict=True))


def cells(scale: Scale) -> list[Json]:
    """Every length of a few texts."""
    texts = range(min(scale.num_texts, 2 if scale.name == "cpu" else 5))
    return [{"text": text, "context": context} for text in texts for context in scale.contexts]


def window(scale: Scale) -> int:
    """Tokens that the drafter reads, the sinks included: 256 as in the paper, but after the tiny
    texts."""
    return min(256, scale.long_context // 16)


def measure(lab: Lab, settings: Json) -> Json:
    """1 - acceptance by temperature and kind of window. All lengths meet the same model, which is
    stretched for the longest."""
    options = {"rope_scaling": lab.scale.rope_scaling} if lab.scale.rope_scaling else {}
    gamma, width = lab.scale.gamma1, window(lab.scale)
    values: Json = {}
    for temperature in TEMPERATURES:
        said = lab.continuation(settings["text"], settings["context"], temperature, **options)
        models = lab.engine(settings["context"], **options).models
        drafter = models.draft or models.target
        guesses = (
            said.by_drafter(drafter, gamma, width - NUM_SINKS),
            said.by_drafter(drafter, gamma, 4 * width - NUM_SINKS),
            said.by_window(drafter, width),
        )
        rates = (said.rate(probs_NV, gamma) for probs_NV in guesses)
        pairs = zip(WAYS, rates, strict=True)
        values[f"{temperature:g}"] = {way: 1 - rate.mean for way, rate in pairs}
    return values


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every length."""
    contexts = distinct(done, "context")
    temperatures = [f"{T:g}" for T in TEMPERATURES]

    def found(context: int, T: str, way: str) -> list[float]:
        return [it[T][way] for it in select(done, context=context)]

    def mean(context: int, T: str, way: str) -> float:
        return sum(found(context, T, way)) / len(found(context, T, way))

    rows = [
        [f"{context:,}", *(spread(found(context, T, way)) for T in temperatures for way in WAYS)]
        for context in contexts
    ]
    columns = ["tokens", *(f"T = {T}, {way}" for T in temperatures for way in WAYS)]
    note = f"1 - accepted / tested, gamma1 = {scale.gamma1}; window of {window(scale)} tokens; "
    note += "median and range over texts. The model is stretched for the longest text throughout."
    short, long = contexts[0], contexts[-1]
    rises = [
        f"{mean(short, T, WAYS[0]):.2f} to {mean(long, T, WAYS[0]):.2f} at T = {T}"
        for T in temperatures
    ]
    is_rise = all(mean(long, T, WAYS[0]) > mean(short, T, WAYS[0]) + 0.05 for T in temperatures)
    verdict = f"From {short:,} to {long:,} tokens the divergence of the drafter with StreamingLLM "
    verdict += f"cache goes from {', '.join(rises)}: it "
    if is_rise:
        verdict += "rises with the length, as in the paper."
    else:
        verdict += "does not rise much, as the next words of these texts depend on what was last "
        verdict += "said, and the drafter was made for this target."

    def draw(axes: Any) -> None:
        for way in WAYS:
            for T, line in ((temperatures[0], "o-"), (temperatures[-1], "s--")):
                means = [mean(context, T, way) for context in contexts]
                axes.plot(contexts, means, line, color=COLORS[way], label=f"{way}, T = {T}")
        axes.set(xscale="log", xlabel="text, tokens", ylabel="1 - accepted / tested", ylim=(0, 1))

    return Shown([Table(columns, rows, note)], verdict, draw)


ITEM = Item(
    "fig2a",
    "Figure 2a: divergence of the drafter by length of the text",
    "The divergence between the target and a draft model with StreamingLLM cache, or with a "
    "sliding window and re-computation, rises with the length of the text, and with temperature.",
    cells,
    measure,
    show,
    minutes_here=9,
    minutes_gpu=17,
)
