"""A text whose KV is saved."""

import pytest

from tests.cascades import settings_of
from tests.core.rigs import WARM, random_prompt

SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16, "prefill_chunk": 32}


def say(engine, prompt):
    """The text after a prompt, and how many of its tokens were not read."""
    end = engine.complete(prompt, **settings_of("triforce", 20, WARM, **SIZES))
    return end.token_ids, end.row_stats.num_cached_tokens


@pytest.fixture(scope="module")
def prompt(engine):
    return random_prompt(engine.config, 120, seed=1)


@pytest.fixture
def saved(engine, prompt, tmp_path):
    engine.release()
    text, _ = say(engine, prompt)
    path = tmp_path / "text.kv"
    assert engine.save_kv(path, "a note") == len(engine.held_tokens)
    engine.release()
    return path, text
