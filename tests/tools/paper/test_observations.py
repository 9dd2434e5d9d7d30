"""Figures 2 and 3 and Table 1: their cells where the answer is known, and that the paper's own
numbers would be called the paper's claim, and others not."""

import dataclasses

import pytest

from tools.paper.item import Done
from tools.paper.items import acceptance, observations, tasks
from tools.paper.lab import Lab
from tools.paper.scale import SCALES
from tools.paper.texts import Text
from tools.serve_load import write_tiny

TINY = SCALES["tiny"]
TEXT = {"text": 0}


@pytest.fixture(scope="module")
def lab(long_text, tmp_path_factory) -> Lab:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, 2 * TINY.trained_context)
    return Lab(TINY, [Text("help", long_text)], str(folder))


def test_a_text_is_read_once_for_all_temperatures(lab):
    warm = lab.continuation(0, 256, 0.6)
    tokens = list(warm.tokens)
    cold = lab.continuation(0, 256, 0.0)
    assert cold is warm
    assert cold.probs_NV.max(1).values.eq(1).all()
    assert lab.continuation(0, 256, 0.6).tokens == tokens


def test_all_tokens_recover_all_attention_and_fewer_less(lab, monkeypatch):
    monkeypatch.setattr(observations, "SHARES", (1 / 256, 0.1, 1.0))
    one, some, everything = observations.measure_best(lab, TEXT)["recovered"]
    assert everything == pytest.approx([1.0, 1.0])
    assert all(0 < a < b < 1 for a, b in zip(one, some, strict=True))


def test_tokens_chosen_once_serve_their_own_query_best(lab, monkeypatch):
    """It recovers what the best tokens do; all tokens recover everything for all queries."""
    monkeypatch.setattr(observations, "SHARES", (observations.SHARE,))
    monkeypatch.setattr(observations, "NUM_QUERIES", 1)
    [best] = observations.measure_best(lab, TEXT)["recovered"]
    chosen = observations.measure_chosen(lab, TEXT)["recovered"]
    assert [layer[0] for layer in chosen] == pytest.approx(best, abs=1e-5)
    assert all(max(layer) == layer[0] for layer in chosen)
    assert [len(layer) for layer in chosen] == [TINY.new_tokens] * 2
    monkeypatch.setattr(observations, "SHARE", 1.0)
    chosen = observations.measure_chosen(lab, TEXT)["recovered"]
    assert chosen == [pytest.approx([1.0] * TINY.new_tokens)] * 2


def test_the_papers_model_reads_more_kv_than_weights_from_26_thousand_tokens_on(lab):
    """Half a MiB a token (32 layers of 32 heads of 128, K and V, 2 bytes); 13.2 GB of weights."""
    for context, is_more in ((16384, False), (32768, True)):
        values = observations.measure_lengths(lab, {"what": "predicted", "context": context})
        assert values["kv"] == context * 2**19
        assert values["weights"] == pytest.approx(13.2e9, rel=0.01)
        assert (values["kv"] > values["weights"]) is is_more
        assert (values["ms"]["attention"] > values["ms"]["rest"]) is is_more
    measured = observations.measure_lengths(lab, {"what": "measured", "context": 256})
    assert measured["kv"] == 256 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("task", ["book", "needle"])
def test_with_a_budget_for_the_whole_text_every_policy_is_always_accepted(lab, task):
    """And TriForce's answer is the target's own."""
    whole = Lab(dataclasses.replace(TINY, budget=1024), lab.texts, lab.model)
    values = tasks.measure(whole, {"task": task, "number": 1})
    for policy in tasks.POLICIES:
        assert values[policy] == pytest.approx({"none": 1, "first": 1}, abs=1e-4)
    if task == "needle":
        assert values["is_same"] is True
        assert values["answer"] == values["triforce_answer"]
        assert 0 <= values["grade"] == values["triforce_grade"]


def test_the_published_table_is_called_so_and_one_where_all_find_the_needle_is_not():
    def cells(numbers) -> list[Done]:
        answer = {"grade": 1.0, "triforce_grade": 1.0, "is_same": True}
        return [
            Done(
                {"task": task, "number": 0},
                {it: {"first": x, "none": x} for it, x in zip(tasks.POLICIES, row, strict=True)}
                | answer,
            )
            for task, row in numbers.items()
        ]

    shown = tasks.show(cells(tasks.BY_TASK), TINY)
    assert "as in the paper, only those that evict fall" in shown.verdict
    assert "the target's own in 1 of 1 questions" in shown.verdict
    assert shown.tables[0].rows[1] == ["needle", "0.999", "0.052", "0.074", "0.988"]
    level = dict.fromkeys(tasks.BY_TASK, (0.99, 0.95, 0.95, 0.97))
    assert "unlike in the paper" in tasks.show(cells(level), TINY).verdict


@pytest.mark.parametrize(
    ("rates", "said"), [((0.3, 0.7), "rises with the length"), ((0.4, 0.42), "does not rise much")]
)
def test_a_divergence_that_rises_is_called_so(rates, said):
    cells = [
        Done(
            {"text": 0, "context": context},
            {T: dict.fromkeys(acceptance.WAYS, rate) for T in acceptance.TEMPERATURES},
        )
        for context, rate in zip((1000, 32000), rates, strict=True)
    ]
    assert said in acceptance.FIG2A.show(cells, TINY).verdict


@pytest.mark.parametrize(("rate", "said"), [(0.95, "are enough"), (0.7, "Not all policies")])
def test_policies_that_are_accepted_with_a_small_budget_are_called_so(rate, said):
    cells = [
        Done({"policy": policy, "budget": budget}, {"mean": rate - 10 / budget})
        for policy in acceptance.POLICIES
        for budget in (128, 1024)
    ]
    assert said in acceptance.FIG3B.show(cells, TINY).verdict


@pytest.mark.parametrize(("last", "said"), [(0.85, "holds, and fades slowly"), (0.3, "not hold")])
def test_locality_that_lasts_is_called_so(last, said):
    layers = [[0.95, 0.9, *[last] * 14]] * 4
    assert said in observations.FIG3C.show([Done(TEXT, {"recovered": layers})], TINY).verdict
