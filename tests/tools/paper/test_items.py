"""Items of the paper: which settings they measure, their cells where the answer is known, and the
questions that they ask."""

import dataclasses

import pytest

from minitri.core.settings import num_nodes
from tools.paper.items import observations, tasks, trees
from tools.paper.items.outputs import speedups, windows
from tools.paper.lab import Lab
from tools.paper.questions import BEGINNING, NEEDLE, Question, hide
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


@pytest.mark.parametrize("method", trees.DEPTHS)
def test_shapes_are_compared_at_equally_many_nodes(method):
    sizes = [num_nodes(plan.tree) for plan in trees.plans(method).values()]
    widths = [trees.DEPTHS[method] * width for width in trees.WIDTHS[method]]
    assert (sizes[0], sizes[1::2], sizes[2::2]) == (0, widths, widths)


def test_windows_are_what_came_between_two_lengths():
    rows = [[10.0, 1.0, 5.0, 4.0], [30.0, 2.0, 15.0, 13.0]]
    assert windows(rows) == [rows[0], [20.0, 1.0, 10.0, 9.0]]
    cell = {"autoregressive": [[10, 2.0, 0, 0]], "triforce": [[20, 1.0, 0, 0]]}
    assert speedups(cell) == [4.0]


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


def test_all_tokens_recover_all_attention_and_fewer_less(lab, monkeypatch):
    monkeypatch.setattr(observations, "SHARES", (1 / 256, 0.1, 1.0))
    fewest, more, everything = observations.measure_best(lab, TEXT)["recovered"]
    assert everything == pytest.approx([1.0, 1.0])
    assert all(0 < a < b < 1 for a, b in zip(fewest, more, strict=True))


def test_tokens_chosen_once_serve_their_own_query_best(lab, monkeypatch):
    """It recovers what the best tokens do; all tokens recover everything for all queries."""
    monkeypatch.setattr(observations, "SHARES", (observations.SHARE,))
    monkeypatch.setattr(observations, "NUM_QUERIES", 1)
    [best] = observations.measure_best(lab, TEXT)["recovered"]
    chosen = observations.measure_chosen(lab, TEXT)["recovered"]
    assert [layer[0] for layer in chosen] == pytest.approx(best, abs=1e-5)
    assert all(max(layer) == layer[0] for layer in chosen)
    monkeypatch.setattr(observations, "SHARE", 1.0)
    chosen = observations.measure_chosen(lab, TEXT)["recovered"]
    assert chosen == [pytest.approx([1.0] * TINY.new_tokens)] * 2


def test_the_papers_model_reads_more_kv_than_weights_from_26_thousand_tokens_on(lab):
    """Half a MiB a token (32 layers of 32 heads of 128, K and V, 2 bytes); 13.2 GB of weights."""
    for context, is_more in ((16384, False), (32768, True)):
        values = observations.measure_lengths(lab, {"what": "predicted", "context": context})
        assert values["kv"] == context * 2**19
        assert values["weights"] == pytest.approx(13.2e9, rel=0.01)
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
    assert task == "book" or values["answer"] == values["triforce_answer"]


def test_an_answer_is_worth_the_share_of_what_was_asked_for():
    question = Question([], ["12,345", "Abc"], 8)
    assert question.grade("They are abc and 12345.") == 1
    assert question.grade("ABC, 1234 5") == 0.5
    assert question._replace(is_any=True).grade("ABC") == 1
    assert question._replace(is_any=True).grade("none") == 0


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_is_hidden_in_a_prompt_of_just_the_length_asked_for(engine, long_text, depth):
    text_ids = engine.tokenizer.encode(long_text[:9000])
    question = hide(engine.tokenizer, text_ids, 1000, depth, 4_321_567)
    needle = NEEDLE.format(number=4_321_567)
    before, sentence, after = engine.tokenizer.decode(question.prompt).partition(needle)
    assert (len(question.prompt), question.answers) == (1000, ["4321567"])
    assert sentence not in after
    assert len(before) / len(before + sentence + after) == pytest.approx(depth, abs=0.35)
    assert after.endswith("assistant\n" + BEGINNING)
