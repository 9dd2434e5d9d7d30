"""A lookup and a model that take turns: exact whatever decides, in step with the text, and sensible
about who is asked."""

from __future__ import annotations

import pytest
import torch

import minitri
from minitri.decoding.random_source import IndependentSource
from minitri.drafters.choice import DrafterChoice
from minitri.drafters.lookup import LookupDrafter, Sources
from minitri.errors import InputError
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.stats import LevelStats
from tests.cascades import near_copy, tiny_engine
from tests.conftest import CPU
from tests.exactness import Table, output_distribution, target_distribution, toy_cascade

PROMPT = [0, 1, 2, 0, 1]
TURNS = Sources(takes_turns=True)
LENGTH = GenerationConfig(40, ignore_eos=True)
GREEDY, COUPLED = (SamplingParams(0.0), False), (SamplingParams(0.8, top_p=0.9), True)


def cheap_drafter(stage: str, num_guesses: float) -> float:
    return 0.1 if stage == "draft" else 1.0


class Alternating(DrafterChoice):
    """Asks each in turn, round by round, whatever they promise."""

    def _asks_model(self, b, num_found):
        row = self._rows[b]
        row.tested += 1  # a count of this row's own rounds, which nothing else changes
        return int(row.tested) % 2 == 0

    def _learn(self, row, *verdict):
        pass


def with_turns(cascade, kind, V):
    """The cascade with a lookup beside its drafter, which is cheap; returns the choice, too."""
    cascade.tuner._prior_seconds = cheap_drafter
    model, num_rows = cascade._drafter, len(cascade.sequences)
    where = {"vocab_size": V, "device": CPU}
    lookup = LookupDrafter(num_rows, LevelStats("lookup"), None, Sources(), **where)
    cascade._drafter = choice = kind("", lookup, model, cascade.tuner)
    return cascade, choice


@pytest.fixture(autouse=True)
def prompt_with_words_to_look_up(monkeypatch):
    monkeypatch.setattr("tests.exactness.PROMPT", PROMPT)


@pytest.fixture(autouse=True)
def plain_costs(monkeypatch):
    """Tiny models cost what a drafter's should, by no clock."""
    monkeypatch.setattr("minitri.stack.prior_seconds", lambda *_: cheap_drafter)
    monkeypatch.setattr("minitri.stack.may_use_clock", lambda *_: False)


@pytest.mark.parametrize("kind", [DrafterChoice, Alternating])
@pytest.mark.parametrize(("gammas", "num_steps"), [((1, None), 3), ((2, 2), 1), ((1, 1), 2)])
def test_a_drafter_that_changes_between_rounds_gives_the_target_distribution(
    kind, gammas, num_steps
):
    """Every random number of every level, several rounds and steps; both drafters are asked."""
    target, horizon = Table(3, 0), 3
    middle, draft = (Table(3, seed, near=target) for seed in (1, 2))
    choices = []

    def build(source, batch_size):
        tables = target, middle if gammas[1] else None, draft
        cascade = toy_cascade(source, batch_size, *tables, *gammas)
        cascade, choice = with_turns(cascade, kind, target.V)
        choices.append(choice)
        return cascade

    probs = output_distribution(build, horizon, target, num_steps=num_steps)
    assert (probs - target_distribution(target, horizon)).abs().max() < 1e-12
    if kind is DrafterChoice:
        assert all(stats.num_tested_tokens for stats in choices[-1].by_drafter)


class Uniform(IndependentSource):
    """A random source with plain numbers, the same for every row."""

    def __init__(self, seed):
        super().__init__([seed] * 2, "token")


def test_both_drafters_know_the_text_and_nothing_else_after_every_step():
    """Whoever guessed what was rejected, and whoever was not asked."""
    target, num_lagging = Table(3, 0), 0
    middle, draft = (Table(3, seed, near=target) for seed in (1, 2))
    for seed in range(20):
        cascade = toy_cascade(Uniform(seed), 2, target, middle, draft, 2, 3)
        cascade, choice = with_turns(cascade, Alternating, target.V)
        for _ in range(6):
            cascade.step()
            for b, sequence in enumerate(cascade.sequences):
                memory = choice._model.runner.memory[b]
                assert memory == sequence[: len(memory)]
                assert len(memory) < len(sequence)
                num_lagging += len(memory) < len(sequence) - 1
                learnt = choice._lookup._rows[b].text.tokens
                assert learnt == sequence[: len(learnt)]
    assert num_lagging


def test_a_row_that_ended_leaves_nothing_to_the_next():
    cascade = toy_cascade(Uniform(0), 1, Table(3, 0), None, Table(3, 2), 2, None)
    cascade, choice = with_turns(cascade, DrafterChoice, 3)
    for _ in range(5):
        cascade.step()
    cascade.retire(0)
    assert choice._rows[0] == type(choice._rows[0])()
    assert choice._model.runner.memory == [[]]
    assert choice._lookup._rows[0].text.tokens == []


def turns(noise: float = 0.02) -> minitri.Engine:
    engine = tiny_engine(noise=noise)
    return minitri.Engine(engine.model, engine.tokenizer, engine.draft, sources=TURNS)


def text_of(engine, distribution, method, prompt, gamma1=3, **others):
    sampling, coupled = distribution
    speculation = SpeculationConfig(method, gamma1=gamma1, coupled=coupled, budget=64)
    return engine.complete(
        prompt, sampling=sampling, generation=LENGTH, speculation=speculation, seed=7, **others
    )


WORDS = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("method", ["naive", "triforce", "auto"])
def test_turns_change_no_text(method, distribution):
    engine, prompt = turns(), WORDS * 6
    plain = text_of(engine, distribution, "autoregressive", prompt)
    done = text_of(engine, distribution, method, prompt)
    assert done.token_ids == plain.token_ids
    if method != "auto":
        lookup, model = done.stats.drafters
        assert (lookup.name, model.name) == ("lookup", "draft")
        assert lookup.num_rounds or distribution is COUPLED  # a text that never repeats itself
        assert model.num_accepted_tokens
        [level] = done.stats.levels[:1]
        assert lookup.num_accepted_tokens + model.num_accepted_tokens == level.num_accepted_tokens
        assert lookup.num_rounds + model.num_rounds == level.num_rounds


@pytest.mark.parametrize("method", ["naive", "triforce"])
def test_a_row_of_a_batch_chooses_as_it_does_alone(method):
    engine, prompts = turns(0.1), [WORDS * 6, list(range(20, 60)), WORDS[:3] * 9]
    speculation = SpeculationConfig(method, gamma1=3, gamma2=4, budget=64)
    settings = {"sampling": SamplingParams(0.9), "generation": LENGTH, "speculation": speculation}
    with engine.generate(prompts, seed=[3, 4, 5], **settings) as run:
        list(run)
    for row, prompt, seed in zip(run.rows, prompts, (3, 4, 5), strict=True):
        assert tuple(row.token_ids) == engine.complete(prompt, seed=seed, **settings).token_ids


def test_tokens_say_which_drafter_guessed_them():
    engine = turns()
    speculation = SpeculationConfig("naive", gamma1=3)
    with engine.generate(WORDS * 6, generation=LENGTH, speculation=speculation) as run:
        origins = {event.origin for event in run if isinstance(event, minitri.Token)}
    assert {"lookup", "draft"} <= origins <= {"lookup", "draft", "recovered", "bonus"}


def asked_model(choice: DrafterChoice, rate: float, num_found: int, accepted: float) -> bool:
    choice._lookup._rows[0].rate = rate
    choice._rows[0].tested, choice._rows[0].accepted = 100.0, 100 * accepted
    return choice._asks_model(0, num_found)


def test_who_promises_more_tokens_per_second_is_asked():
    cascade = toy_cascade(Uniform(0), 1, Table(3, 0), None, Table(3, 2), 2, None)
    _, choice = with_turns(cascade, DrafterChoice, 3)
    choice.gamma = 2
    assert not asked_model(choice, 0.9, 2, accepted=0.9)
    assert asked_model(choice, 0.9, 1, accepted=0.9)
    assert asked_model(choice, 0.0, 0, accepted=0.5)
    assert not asked_model(choice, 0.0, 0, accepted=0.01)  # no guess at all is best
    choice._tuner._prior_seconds = lambda stage, num_guesses: 1.0
    assert not asked_model(choice, 0.0, 0, accepted=0.5)  # 1.75 tokens in 3 units of time


def test_a_model_that_was_not_asked_for_long_is_asked_again():
    cascade = toy_cascade(Uniform(0), 1, Table(3, 0), None, Table(3, 2), 2, None)
    _, choice = with_turns(cascade, DrafterChoice, 3)
    choice.gamma = 2
    assert not asked_model(choice, 0.5, 2, accepted=0.0)
    choice._rows[0].num_unused = 1000
    assert asked_model(choice, 0.5, 2, accepted=0.0)


def test_a_model_that_fails_leaves_the_guessing_to_lookup(caplog):
    engine = turns()
    engine.draft.norm.weight.fill_(torch.nan)
    done = text_of(engine, GREEDY, "naive", WORDS * 6)
    assert done.token_ids == text_of(engine, GREEDY, "autoregressive", WORDS * 6).token_ids
    assert "guesses no more" in caplog.text
    assert done.stats.drafters[1].num_accepted_tokens == 0


def test_a_tree_is_refused_beside_turns():
    engine = turns()
    with pytest.raises(InputError, match="tree is 4, but drafters that take turns guess chains"):
        engine.complete(WORDS, speculation=SpeculationConfig("naive", tree="4"))


def test_an_engine_names_both_drafters():
    engine = turns()
    assert "drafter suffix,llama," in repr(engine)
    assert near_copy(engine.model, 0.0).config.name == "llama"
