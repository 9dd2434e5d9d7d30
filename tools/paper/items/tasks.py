"""Table 1: acceptance by policy, after books and after questions; and whether answers are right."""

import random
import statistics

from minitri import SamplingParams
from tools.paper.continuation import Continuation
from tools.paper.item import PUBLISHED, Done, Item, Json, Shown, Table
from tools.paper.items import acceptance
from tools.paper.items.acceptance import NUM_WHOLE, by_policy
from tools.paper.lab import Lab
from tools.paper.questions import NEEDLE_TOKENS, Question, hide
from tools.paper.scale import Scale
from tools.paper.shapes import bars, grouped, means, spread, table

POLICIES = acceptance.POLICIES | {"topk": "Top-K (bound)", "retrieval": "Retrieval"}
BY_TASK = PUBLISHED["table1"]["accepted"]
"""Published, by policy."""
TITLES = {"book": "book text", "needle": "needle"}
KINDS = {"none": 0, "first": NUM_WHOLE}
"""First layers that are whole."""
DEPTHS = (0.2, 0.5, 0.8)
LEAST_LENGTH = 700
"""Tokens of a needle's prompt where each is a letter, as of the tiny model."""


def cells(scale: Scale) -> list[Json]:
    """Texts; needles at every depth."""
    counts = {"book": min(scale.num_texts, 10), "needle": min(scale.num_texts, 9)}
    return [{"task": task, "number": n} for task, count in counts.items() for n in range(count)]


def measure(lab: Lab, settings: Json) -> Json:
    """The expected acceptance by policy, with the first layers whole and not; for questions, what
    the answers are worth."""
    gamma = lab.scale.gamma2
    if settings["task"] == "book":
        said = lab.continuation(settings["number"], lab.scale.context)
        num_said = lab.scale.new_tokens
        values: Json = {}
    else:
        said, num_said, values = answer(lab, ask(lab, settings["number"]))
    for policy in POLICIES:
        found = by_policy(said, policy, lab.speculation("retrieval"), KINDS.values())
        rates = (said.rate(probs_NV[:num_said], gamma).mean for probs_NV in found)
        values[policy] = dict(zip(KINDS, rates, strict=True))
    return values


def ask(lab: Lab, number: int) -> Question:
    """A question whose prompt and answer have the scale's context together."""
    length = max(lab.scale.context - lab.scale.new_tokens, LEAST_LENGTH)
    engine = lab.engine(length)
    hidden = random.Random(number).randint(1_000_000, 9_999_999)
    text_ids = lab.prompt(number // len(DEPTHS), length, engine)
    return hide(engine.tokenizer, text_ids, length, DEPTHS[number % len(DEPTHS)], hidden)


def answer(lab: Lab, question: Question) -> tuple[Continuation, int, Json]:
    """Continuation by the target, and how many of its tokens are the answer (at least one after the
    first, which nobody guesses), and what it is worth, next to that of TriForce."""
    engine = lab.engine(len(question.prompt))
    num_new = min(NEEDLE_TOKENS, lab.scale.new_tokens)
    block = lab.scale.gamma2 + 2  # guesses come in whole blocks, and the last may be cut
    said = Continuation(engine, question.prompt, SamplingParams(), num_new + block)
    tokens = said.tokens[said.num_prompt :][:num_new]
    ends = [n for n, token in enumerate(tokens) if token in engine.config.eos_token_ids]
    tokens = tokens[: (ends or [num_new])[0]]
    settings: Json = {"speculation": lab.speculation("triforce"), "seed": 0, "temperature": 0}
    own = engine.complete(question.prompt, max_new_tokens=num_new, **settings)
    text = engine.tokenizer.decode(tokens)
    values: Json = {"answer": text, "grade": question.grade(text)}
    values |= {"triforce_answer": own.text, "triforce_grade": question.grade(own.text)}
    return said, max(2, len(tokens)), values | {"is_same": own.text == text}


def compare(rates: dict[str, dict[str, float]]) -> str:
    """Whether those that evict fall on the needle, and retrieval does not, as in the paper."""
    parts, falls = [], []
    for policy in ("retrieval", "streaming", "h2o"):
        book, needle = (rates[policy][task] for task in BY_TASK)
        parts.append(f"{POLICIES[policy]} {needle:.2f} ({book:.2f})")
        falls.append(needle < book - 0.1)
    holds = falls == [False, True, True]
    end = "as in the paper, only those that evict fall." if holds else "unlike in the paper."
    return f"On the needle (on books) {', '.join(parts)}: {end}"


def show(done: list[Done], scale: Scale) -> Shown:
    found = {
        kind: {policy: grouped(done, "task", policy, kind) for policy in POLICIES} for kind in KINDS
    }
    none, first = (
        [[TITLES[task], *(spread(it[task], 3) for it in rates.values())] for task in rates["topk"]]
        for rates in found.values()
    )
    first += [[f"{TITLES[task]}, paper", *map(str, paper)] for task, paper in BY_TASK.items()]
    note = f"Accepted / tested with {scale.budget:,} of {scale.context:,} tokens, medians and "
    note += "ranges; books at T = 0.6, top-p 0.9; questions greedy, over the tokens of the answer. "
    note += "Paper: 4K of 120K tokens."
    questions = [it for it in done if it.settings["task"] != "book"]
    own, cascade, same = (
        grouped(questions, "task", name) for name in ("grade", "triforce_grade", "is_same")
    )
    columns = {
        "Answers": lambda it: TITLES[it],
        "target": lambda it: f"{statistics.mean(own[it]):.2f}",
        "TriForce": lambda it: f"{statistics.mean(cascade[it]):.2f}",
        "same text": lambda it: f"{sum(same[it])} of {len(same[it])}",
    }
    worth = "Share of the answers that the text holds: of the target, and of TriForce, greedy."
    tables = [
        Table(["First two layers whole", *POLICIES.values()], first, note),
        Table(
            ["No layer whole", *POLICIES.values()], none, "As the paper's system runs, and ours."
        ),
        table(own, columns, worth),
    ]
    rates = {policy: means(them) for policy, them in found["first"].items()}
    verdict = f"{compare(rates)} TriForce's answer is the target's own in "
    verdict += f"{sum(map(sum, same.values()))} of {len(questions)} questions."
    draw = bars({POLICIES[it]: rates[it] for it in rates}, ylabel="accepted / tested")
    return Shown(tables, verdict, draw)


TABLE1 = Item("table1", cells, measure, show, 8, 100)
