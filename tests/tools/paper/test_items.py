"""Items of the paper: which settings they measure, their cells where the answer is known, the
questions that they ask, and figures that follow from formulas."""

import dataclasses

import pytest
import torch

from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.items import observations, tasks
from tools.paper.items.exactness import next_token, toy_distance
from tools.paper.items.offloading import PAPER as OFFLOADED
from tools.paper.items.offloading import predicted
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
    answers = {"They are abc and 12345.": (1, 1), "ABC, 1234 5": (0.5, 1), "none": (0, 0)}
    for answer, grades in answers.items():
        any_of_them = question._replace(is_any=True)
        assert (question.grade(answer), any_of_them.grade(answer)) == grades


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


def test_the_papers_bound_is_that_of_guesses_that_cost_nothing():
    """13.1, 7 times that of the naive policy."""
    most = bound(RATES["retrieval"])
    assert f"{most:.1f}, {most / bound(RATES['draft']):.0f}" == "13.1, 7"


def test_the_papers_times_follow_from_bytes_and_its_acceptance():
    """On an A100 2.31 times as fast: bytes over bandwidth know nothing of Python's time, so more.
    With offloading its milliseconds a token, where it says them."""
    assert 2.31 < speedup(on_chip(122_880), [PAPER]) < 4
    for flags, ms, _, _ in OFFLOADED.values():
        assert ms == 0 or predicted(flags)["ms"] == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_a_token_follows_the_target_with_the_residual_and_the_published_formula_without(seed):
    generator = torch.Generator().manual_seed(seed)
    rows_3V = torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.25
    rows_3V = rows_3V.clamp_min(0) + 1e-3 * torch.eye(4, dtype=torch.float64)[seed % 4]
    q_1V, phat_1V, p_1V = (rows_3V / rows_3V.sum(1, keepdim=True)).split(1)
    torch.testing.assert_close(next_token(q_1V, phat_1V, p_1V, "ours"), p_1V)
    common_1V, left_1V = torch.minimum(q_1V, phat_1V), (p_1V - phat_1V).clamp_min(0)
    middle_1V = common_1V + (1 - common_1V.sum()) * phat_1V
    accepted_1V = middle_1V * (p_1V / phat_1V).nan_to_num(0).clamp_max(1)
    wanted_1V = accepted_1V + (1 - accepted_1V.sum()) * left_1V / left_1V.sum()
    torch.testing.assert_close(next_token(q_1V, phat_1V, p_1V, "published"), wanted_1V)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.2])
def test_only_with_the_residual_do_toys_write_what_their_targets_would(temperature):
    assert toy_distance(0, temperature, is_exact=True) < 1e-12
    published = toy_distance(0, temperature, is_exact=False)
    assert published == 0 if temperature == 0 else published > 1e-5
