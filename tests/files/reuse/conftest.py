"""A text whose KV is saved, and a disk without room."""

import contextlib
import resource

import pytest

from tests.conftest import settings_of
from tests.core.rigs import WARM, random_prompt

SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16}


def say(engine, prompt):
    """The text after a prompt, and how many of its tokens were not read."""
    end = engine.complete(prompt, **settings_of("triforce", 12, WARM, prefill_chunk=32, **SIZES))
    return end.token_ids, end.row_stats.num_cached_tokens


@pytest.fixture(scope="module")
def prompt(engine):
    return random_prompt(engine.config, 120, seed=1)


@pytest.fixture
def text(engine, prompt):
    engine.release()
    return say(engine, prompt)[0]


@pytest.fixture
def saved(engine, text, tmp_path):
    path = tmp_path / "text.kv"
    assert engine.save_kv(path, "a note") == len(engine.held_tokens)
    engine.release()
    return path, text


@contextlib.contextmanager
def files_may_not_grow():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9999, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
