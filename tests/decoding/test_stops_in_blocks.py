"""A text ends where it ends, wherever in a block of guesses that is, and whoever came up with the
last token."""

import pytest

from minitri import End, Engine, GenerationConfig, SamplingParams, SpeculationConfig, Token
from tests.cascades import random_prompt, tiny_engine

NUM_NEW = 16
NOISY = SamplingParams(temperature=0.9, top_k=50, top_p=0.95)
SMALL = {
    "budget": 40,
    "chunk_size": 4,
    "num_sink_tokens": 2,
    "num_recent_tokens": 40,
    "gamma1": 2,
    "gamma2": 3,
}
"""Caches that miss a part of a prompt of 50 tokens: of the guesses some are right and some are
wrong."""
STACKS = [("naive", "model"), ("retrieval", "none"), ("triforce", "model"), ("triforce", "ngram")]
ORIGINS = {"draft", "retrieval", "recovered", "bonus"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(noise=0.01)


@pytest.fixture(scope="module")
def prompts(engine) -> list[list[int]]:
    return [random_prompt(engine.config, n, seed=n) for n in (50, 2, 31)]


@pytest.fixture
def set_eos(engine, monkeypatch):
    """Makes these tokens end a text."""
    return lambda *tokens: monkeypatch.setattr(
        engine.model, "config", engine.config.with_eos(tokens)
    )


def run(
    engine,
    prompts,
    method="autoregressive",
    drafter="none",
    *,
    n=NUM_NEW,
    sampling=NOISY,
    seed=3,
    **settings,
):
    """Per row: the `End` event, and the origins of its tokens. Coupled draws: every method says the
    same."""
    used = Engine(engine.model, engine.tokenizer, engine.draft if drafter == "model" else None)
    speculation = SpeculationConfig(method, coupled=True, **SMALL)
    generation = GenerationConfig(max_new_tokens=n, **settings)
    events = list(
        used.generate(
            prompts, sampling=sampling, generation=generation, speculation=speculation, seed=seed
        )
    )
    ends = {event.row: event for event in events if isinstance(event, End)}
    origins = []
    for row in sorted(ends):
        tokens = [event for event in events if isinstance(event, Token) and event.row == row]
        last = max(i for i, event in enumerate(events) if getattr(event, "row", None) == row)
        assert events[last] is ends[row]  # nothing of this row comes after its end
        assert tuple(token.token_id for token in tokens) == ends[row].token_ids
        assert "".join(token.text for token in tokens) == ends[row].text
        origins.append([token.origin for token in tokens])
    assert ends[0].stats.num_generated_tokens == sum(map(len, origins))
    return [ends[row] for row in sorted(ends)], origins


def said(ends) -> list[tuple]:
    return [(end.token_ids, end.text, end.finish_reason) for end in ends]


def test_end_tokens_end_a_text_at_every_offset_of_a_block(engine, prompts, set_eos):
    """Each token of the free text in turn is made the end token, for every stack of the cascade,
    greedy and not."""
    last_origins = set()
    for sampling in (NOISY, SamplingParams()):
        set_eos()
        free, _ = run(engine, prompts[0], sampling=sampling)
        for token in dict.fromkeys(free[0].token_ids):
            set_eos(token)
            position = free[0].token_ids.index(token)
            for method, drafter in STACKS:
                ends, origins = run(engine, prompts[0], method, drafter, sampling=sampling)
                assert ends[0].token_ids == free[0].token_ids[: position + 1]
                assert ends[0].finish_reason == "eos"
                assert said(ends) == said(run(engine, prompts[0], sampling=sampling)[0])
                last_origins |= (
                    set(origins[0][-1:]) if position else set()
                )  # the first token is in no block
    assert last_origins == ORIGINS


def test_stop_strings_end_a_text_at_every_offset_of_a_block(engine, prompts, set_eos):
    """Every piece of two characters of a few free texts, be it of one token or across two, for
    every stack."""
    set_eos()
    last_origins = set()
    for seed, sampling in (
        (0, NOISY),
        (1, NOISY),
        (2, NOISY),
        (3, SamplingParams(temperature=0.5)),
    ):
        distribution = {"seed": seed, "sampling": sampling}
        free = run(engine, prompts[0], **distribution)[0][0].text
        for stop in dict.fromkeys(free[i : i + 2] for i in range(len(free) - 1)):
            if "\ufffd" in stop:
                continue
            wanted, _ = run(engine, prompts[0], **distribution, stop=(stop,))
            assert wanted[0].text == free[: free.find(stop)]
            assert wanted[0].finish_reason == "stop"
            for method, drafter in STACKS:
                ends, origins = run(
                    engine, prompts[0], method, drafter, **distribution, stop=(stop,)
                )
                assert said(ends) == said(wanted)
                last_origins |= set(origins[0][-1:]) if len(origins[0]) > 1 else set()
    assert last_origins == ORIGINS


@pytest.mark.parametrize(("method", "drafter"), STACKS)
def test_the_limit_cuts_inside_a_block(engine, prompts, set_eos, method, drafter):
    set_eos()
    free, _ = run(engine, prompts[0])
    for n in range(1, NUM_NEW):
        ends, _ = run(engine, prompts[0], method, drafter, n=n)
        assert (ends[0].token_ids, ends[0].finish_reason) == (free[0].token_ids[:n], "length")


@pytest.mark.parametrize(("method", "drafter"), STACKS)
def test_rows_of_a_batch_end_at_different_times(engine, prompts, set_eos, method, drafter):
    """Which rows end, and when, changes from run to run; the others go on as if they were alone."""
    set_eos()
    free, _ = run(engine, prompts)
    for first, second in ((0, 7), (3, 2), (9, 0), (12, 5)):
        set_eos(free[0].token_ids[first], free[2].token_ids[second])
        ends, _ = run(engine, prompts, method, drafter)
        assert said(ends) == said(run(engine, prompts)[0])
        assert len({len(end.token_ids) for end in ends}) >= 2
        assert {end.finish_reason for end in ends} >= {"eos"}


@pytest.mark.parametrize(("method", "drafter"), STACKS)
def test_an_end_token_may_be_ignored_inside_a_block(engine, prompts, set_eos, method, drafter):
    set_eos()
    free, _ = run(engine, prompts[0])
    set_eos(*free[0].token_ids)
    ends, _ = run(engine, prompts[0], method, drafter, ignore_eos=True)
    assert (ends[0].token_ids, ends[0].finish_reason) == (free[0].token_ids, "length")
