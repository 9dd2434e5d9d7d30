"""Items of the paper: which settings they measure, and what they make of what was measured."""

import math

import pytest

from minitri import GenerationConfig, Request, SpeculationConfig
from minitri.core.settings import num_nodes
from tools.paper.item import Done
from tools.paper.items import acceptance, speeds, trees
from tools.paper.items.outputs import advance, lengths, speedups, windows
from tools.paper.lab import Lab
from tools.paper.scale import SCALES
from tools.paper.texts import Text

TINY = SCALES["tiny"]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_chunks_fill_the_budget_and_leave_a_choice_of_two(scale):
    sizes = {it["chunk_size"] for it in acceptance.FIG6B.cells(scale)}
    assert min(sizes) == 1
    assert max(sizes) == min(scale.budget // 2, 1024)
    assert all(scale.budget % size == 0 for size in sizes)


def test_every_pair_of_gammas_is_measured_once():
    pairs = [speeds.ways_by_gamma(name) for name in speeds.BY_GAMMA]
    names = {str(pair) for by_gamma in pairs for pair in by_gamma.values()}
    assert len(names) == 8 + 10 - 1
    assert [it["gamma2"] for it in pairs[1].values()] == [*range(1, 11)]


@pytest.mark.parametrize("method", trees.DEPTHS)
def test_shapes_are_compared_at_equally_many_nodes(method):
    sizes = [num_nodes(plan.tree) for plan in trees.plans(method).values()]
    assert sizes[0] == 0
    assert sizes[1::2] == sizes[2::2] == [trees.DEPTHS[method] * it for it in trees.WIDTHS[method]]


def test_trees_are_compared_with_chains_of_their_method():
    values = {
        name: {"tokens_per_step": 2.0 + (name != "chain")}
        for method in trees.DEPTHS
        for name in trees.plans(method)
    }
    shown = trees.show([Done(it, values) for it in trees.FIG6C.cells(TINY)], TINY)
    assert shown.tables[0].rows[-1][:4:2] == ["retrieval", "3.00"]
    assert "gain, in tokens a step, 1.00 to 1.00 by the drafter's" in shown.verdict


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.5, 0.51, 0.6, 0.7, 0.9], "rises with the budget, from 0.500 to 0.900: the first"),
        ([0.5, 0.51, 0.6, 0.7, 0.9], "first doubling adds 0.010, the last 0.200"),
        ([0.5, 0.7, 0.6, 0.85, 0.86], "does not always rise"),
    ],
)
def test_what_a_budget_adds_is_said_as_it_is(rates, said):
    done = [
        Done({"what": "rate", "text": 0, "budget": budget}, {"mean": rate})
        for budget, rate in zip(TINY.budgets, rates, strict=True)
    ]
    gains = {str(it): {"speedup": {"median": float(it == 32)}} for it in TINY.budgets}
    verdict = acceptance.FIG6A.show([*done, Done({"what": "speed"}, gains)], TINY).verdict
    assert said in verdict
    assert "32 tokens are fastest here, 12.5% of the text" in verdict


def test_windows_are_what_came_between_two_lengths():
    rows = [[10.0, 1.0, 5.0, 4.0], [30.0, 2.0, 15.0, 13.0]]
    assert windows(rows) == [rows[0], [20.0, 1.0, 10.0, 9.0]]
    cell = {"autoregressive": [[10, 2.0, 0, 0]], "triforce": [[20, 1.0, 0, 0]]}
    assert speedups(cell) == [4.0]


def test_a_length_is_reached_in_whole_steps(engine):
    """Tokens of a step that was begun before it count with their seconds, in the same window."""
    generation = GenerationConfig(60, ignore_eos=True)
    request = Request(list(range(40, 120)), 0, generation=generation)
    speculation = SpeculationConfig("retrieval", gamma2=4, budget=64)
    run = engine.stream([request], generation=generation, speculation=speculation)
    rows = [advance(run, num_tokens) for num_tokens in (20, 40, 60)]
    stats = run.stats
    assert all(a < b for a, b in zip(rows[0][:2], rows[1][:2], strict=True))
    for num_tokens, row in zip((20, 40, 60), rows, strict=True):
        assert num_tokens - 1 <= row[0] <= num_tokens + 4
    assert rows[-1][1] == stats.decode_seconds
    assert math.fsum(it[0] for it in windows(rows)) == rows[-1][0]


def test_outputs_are_as_long_as_published():
    assert lengths(SCALES["cpu"]) == [256, 512, 768, 1024, 1536, 2048]
    assert lengths(SCALES["gpu"])[-1] == 4096
    assert max(lengths(SCALES["tiny"])) <= 256


def test_a_datastore_never_holds_the_prompt_nor_what_follows_it(engine):
    """Else it would guess what was memorised; also of a later part of a single text."""
    texts = [Text("a", "abc " * 200), Text("b", "xyz " * 200)]
    [others] = Lab(TINY, texts).other_texts(2, engine)  # the first, a later part
    assert engine.tokenizer.decode(others).split() == ["xyz"] * 200
    words = " ".join(map(str, range(1000)))
    lab, ids = Lab(TINY, [Text("a", words)]), engine.tokenizer.encode(words)
    for part in (0, 1):
        [rest] = lab.other_texts(part, engine)
        start = part * TINY.context
        assert lab.prompt(part, TINY.context, engine) == ids[start : start + TINY.context]
        assert rest == ids[:start] + ids[start + TINY.context + 2 * TINY.new_tokens :]
