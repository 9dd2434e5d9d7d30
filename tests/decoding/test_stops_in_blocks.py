"""A text ends where it ends, wherever in a block of guesses that is, and whoever came up with the
last token."""

import pytest

from minitri import End, Engine, GenerationConfig, SamplingParams, SpeculationConfig, Token
from tests.cascades import random_prompt, tiny_engine

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
STACKS = [
    ("naive", "engine"),
    ("retrieval", "engine"),
    ("triforce", "engine"),
    ("triforce", "lookup"),
]
ORIGINS = {"draft", "retrieval", "recovered", "bonus"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(noise=0.01)


@pytest.fixture
def set_eos(engine, monkeypatch):
    """Makes these tokens end a text."""
    return lambda *tokens: monkeypatch.setattr(
        engine.model, "config", engine.config.with_eos(tokens)
    )


def run(engine, method="autoregressive", drafter="engine", *, sampling=NOISY, seed=3, **settings):
    """The `End` event, and the origins of its tokens. Coupled: every method says the same."""
    *events, end = engine.generate(
        random_prompt(engine.config, 50, seed=50),
        sampling=sampling,
        generation=GenerationConfig(16, **settings),
        speculation=SpeculationConfig(method, drafter=drafter, coupled=True, **SMALL),
        seed=seed,
    )
    assert isinstance(end, End)
    tokens = [event for event in events if isinstance(event, Token)]
    assert tuple(token.token_id for token in tokens) == end.token_ids
    assert "".join(token.text for token in tokens) == end.text
    return end, [token.origin for token in tokens]


def test_end_tokens_end_a_text_at_every_offset_of_a_block(engine, set_eos):
    """Each token of the free text in turn is made the end token, for every stack of the cascade,
    greedy and not."""
    last_origins = set()
    for sampling in (NOISY, SamplingParams()):
        set_eos()
        free, _ = run(engine, sampling=sampling)
        for token in dict.fromkeys(free.token_ids):
            set_eos(token)
            position = free.token_ids.index(token)
            for stack in STACKS:
                end, origins = run(engine, *stack, sampling=sampling)
                assert end.token_ids == free.token_ids[: position + 1]
                assert end.finish_reason == "eos"
                assert end.text == run(engine, sampling=sampling)[0].text
                last_origins |= {origins[-1]} if position else set()  # the first is in no block
    assert last_origins == ORIGINS


def test_stop_strings_end_a_text_at_every_offset_of_a_block(engine, set_eos):
    """Every piece of two characters of a few free texts, be it of one token or across two, for
    every stack."""
    set_eos()
    last_origins = set()
    for seed, sampling in ((0, NOISY), (1, NOISY), (2, NOISY), (3, SamplingParams(0.5))):
        distribution = {"seed": seed, "sampling": sampling}
        free = run(engine, **distribution)[0].text
        for stop in dict.fromkeys(free[i : i + 2] for i in range(len(free) - 1)):
            if "\ufffd" in stop:
                continue
            wanted, _ = run(engine, **distribution, stop=(stop,))
            assert (wanted.text, wanted.finish_reason) == (free[: free.find(stop)], "stop")
            for stack in STACKS:
                end, origins = run(engine, *stack, **distribution, stop=(stop,))
                said = [(it.token_ids, it.text, it.finish_reason) for it in (end, wanted)]
                assert said[0] == said[1]
                last_origins |= {origins[-1]} if len(origins) > 1 else set()
    assert last_origins == ORIGINS
