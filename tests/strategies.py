"""Random runs for property tests: prompts, a drafter and every setting at once.

A `Case` holds numbers, not objects, so a failing one can be read and copied. What is drawn leans to
small numbers, where the edges of blocks, chunks and windows meet.
"""

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

from minitri import Engine, Grammar
from minitri.core.errors import MAX_COUNT
from minitri.core.settings import METHODS, VERIFICATIONS
from minitri.text.prompt_ids import MAX_SEED
from tests.conftest import tiny_engine, tiny_model
from tests.core.rigs import near_copy, trimmed_copy

VOCAB = 320
DRAFTERS = ["lookup", "plug-in", "near copy", "the target itself", "unrelated", "larger vocabulary"]
DRAFTERS += ["smaller vocabulary", "trimmed head", "short context"]
TREES = ["1", "2", "5", "12", "2x1", "3x2", "4x4", "64", "1x64"]
MAX_PASSES = 120
"""Passes of the small models that a run may take where every guess is rejected."""
SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["She", "the sea", "é"]}, "n": {
"type": "integer"}}, "required": ["name"], "additionalProperties": false}"""
GRAMMARS = [
    Grammar("json_object"),
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(She|she)( had| was|,){2,9}[.!]"),
    Grammar("lark", 'start: word (" " word)*\nword: /[a-z]{1,9}/'),
    Grammar("choice", '["She had", "She had been", "the sea", "日本"]'),
    Grammar("choice", '["She had been forced into prudence in her youth -- or so they said!"]'),
]


@dataclass(frozen=True)
class Case:
    drafter: str
    ids: list[list[int]]
    seed: int
    settings: dict[str, Any]
    number: int
    """Chooses the plan of each step, where it is open, and a row to be looked at closely."""


def case_of(number: int) -> Case:
    rng = random.Random(number)

    def rarely(odds: int = 6) -> bool:
        return rng.randrange(odds) == 0

    def small(most: int, *rare: Any, least: int = 1) -> Any:
        return rng.choice(rare) if rare and rarely() else rng.randint(least, most)

    ids = []
    for _ in range(rng.randint(1, 4)):
        kinds = [rng.randrange(VOCAB) for _ in range(rng.choice([VOCAB, VOCAB, 1, 2, 5]))]
        ids.append([rng.choice(kinds) for _ in range(small(100, 1, 300))])
    drafter = rng.choice(DRAFTERS)
    chunk = rng.choice([4, 8, 1, 2, 3, 5, 16, 64])
    has_wide_windows = drafter == "lookup" or rarely(10)  # else some would be refused
    settings = {
        "method": rng.choice(["triforce", *METHODS]),
        "policy": rng.choice(["retrieval", "retrieval", "received"]),
        "verification": rng.choice(VERIFICATIONS),
        "gamma1": small(6, None, 64),
        "gamma2": small(6, None, 64),
        "tree": rng.choice(TREES) if rarely(4) else "",
        "budget": chunk * small(max(32 // chunk, 2), 10**9),
        "chunk_size": chunk,
        "num_sink_tokens": small(6, *(300, MAX_COUNT) if has_wide_windows else (4,), least=0),
        "num_recent_tokens": small(40, *(10**5, MAX_COUNT) if has_wide_windows else (252,)),
        "observation_window": small(20, 64, 1024),
        "rebuild_stride": small(30, MAX_COUNT),
    }
    if "x" in settings["tree"]:
        settings["gamma1"] = None
    is_greedy = rarely(2)
    num_passes = (settings["gamma1"] or 4) * (settings["gamma2"] or 6)
    settings |= {
        "coupled": not is_greedy or rarely(2),
        "temperature": 0.0 if is_greedy else rng.choice([0.8, 1.0, 1e-6, 100, rng.random() + 0.01]),
        "top_k": rng.choice([0, 40, 1, 2, 5, VOCAB - 1, VOCAB, 10**6]),
        "top_p": rng.choice([1.0, 0.95, 0.5, 1e-9, rng.random() + 1e-9]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 1.0, rng.random()]),
        "presence_penalty": rng.uniform(-2, 2) if rarely(3) else 0.0,
        "grammar": rng.choice(GRAMMARS) if rarely(8) else None,
        "max_new_tokens": min(small(40, 80), max(MAX_PASSES // num_passes, 3)),
        "prefill_chunk": small(100, 3, MAX_COUNT),
    }
    seed = small(2**31, 0, MAX_SEED - len(ids) + 1)
    return Case(drafter, ids, seed, settings, number)


class Echo:
    """A drafter from outside: the token before the last one."""

    def guess(self, tokens: list[int], row: int) -> int:
        return tokens[-2] if len(tokens) > 1 else tokens[0]


@functools.cache
def engine_of(drafter: str, *, is_exact: bool = True) -> Engine:
    """The engine with the drafter of a name in DRAFTERS, all with one target; unless `is_exact` the
    retrieval level has other weights."""
    engine = tiny_engine()
    target, config = engine.model, replace(engine.config, eos_token_ids=(2, 300))
    target.config = config
    draft = engine.models.draft if drafter == "near copy" else None
    if drafter == "the target itself":
        draft = target
    if drafter == "unrelated":
        draft = tiny_model(replace(config, num_layers=1), seed=5)
    if drafter == "trimmed head":
        draft = trimmed_copy(target, range(0, VOCAB - 2, 3))
    if drafter.endswith("vocabulary"):
        draft = tiny_model(replace(config, vocab_size=397 if drafter[0] == "l" else 200))
    if drafter == "short context":
        draft = near_copy(target, 0.02)
        draft.config = replace(config, context_length=100)
    proposing = None if is_exact else near_copy(target, 0.03, seed=3)
    plugged = Echo() if drafter == "plug-in" else None
    return Engine(target, engine.tokenizer, draft, proposing, plugged)
