"""Random runs for property tests: prompts, a drafter and every setting at once.

A `Case` holds numbers, not objects, so a failing one can be read, copied and shrunk. What is drawn
leans to small numbers, where the edges of blocks, chunks and windows meet; some settings are wrong.
"""

import copy
import dataclasses
import functools
import math
import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from minitri import Engine, Grammar
from minitri.core.config import ModelConfig
from minitri.core.errors import MAX_COUNT
from minitri.core.model.llama import Llama
from minitri.core.settings import METHODS, VERIFICATIONS
from minitri.text.prompt_ids import MAX_SEED
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer, tiny_model
from tests.core.policies import NAMES
from tests.core.rigs import near_copy, tiny_config, trimmed_copy

VOCAB = 320
CONFIG = tiny_config(vocab_size=VOCAB, context_length=512)
DRAFTERS = ["ngram", "near copy", "the target itself", "unrelated", "larger vocabulary"]
DRAFTERS += ["smaller vocabulary", "trimmed head", "short context"]
ORDINARY_WINDOW = {"num_sink_tokens": 4, "num_recent_tokens": 252}


@dataclass(frozen=True)
class PromptSpec:
    """A prompt by a few numbers: random tokens, or a few of them over and over."""

    length: int
    seed: int
    num_kinds: int = VOCAB

    @property
    def tokens(self) -> list[int]:
        rng = random.Random(self.seed)
        kinds = [rng.randrange(VOCAB) for _ in range(self.num_kinds)]
        return [rng.choice(kinds) for _ in range(self.length)]


@dataclass(frozen=True)
class Case:
    """A run: models, prompts and settings, right or wrong ones."""

    drafter: str
    prompts: tuple[PromptSpec, ...]
    seed: int | tuple[int, ...]
    slack: int
    """Tokens that the target could hold beyond the longest prompt and its output; -1: too few."""
    sampling: dict[str, Any]
    generation: dict[str, Any]
    speculation: dict[str, Any]
    stop: tuple[str, ...]
    stops_in_text: tuple[tuple[int, int, int], ...]
    """More stop strings: (row, start, length) in the text that goes on without them."""
    eos_in_text: tuple[tuple[int, int], ...]
    """Tokens that end a text: (row, place) among the tokens that come without them."""
    plan_seed: int | None
    """Plans of a step are chosen at random, where they are open; None: by the autotuner."""
    row: int
    """One of the rows, to be looked at closely."""

    @property
    def ids(self) -> list[list[int]]:
        return [prompt.tokens for prompt in self.prompts]

    @property
    def row_seed(self) -> int:
        return self.seed + self.row if isinstance(self.seed, int) else self.seed[self.row]


def usually(strategy: st.SearchStrategy, *rare: st.SearchStrategy, odds: int = 6) -> Any:
    """Once in a given number of times one of the rare values."""
    return st.integers(0, odds - 1).flatmap(
        lambda n: st.one_of(*rare) if n == odds - 1 else strategy
    )


def one_of(*values: Any) -> st.SearchStrategy:
    return st.sampled_from(values)


SMALL, ANY = st.one_of(st.integers(1, 6), st.none()), st.integers(1, 64)
GAMMAS = usually(st.tuples(SMALL, SMALL), st.tuples(ANY, SMALL), st.tuples(SMALL, ANY), odds=3)
TREES = one_of("1", "2", "5", "12", "2x1", "3x2", "4x4", "64", "1x64")
MAX_PASSES = 400
"""Passes of the small models that a run may take where every guess is rejected."""
CHUNKS = one_of(4, 8, 1, 2, 3, 5, 16, 64, 1024)


@st.composite
def speculations(draw: st.DrawFn) -> dict[str, Any]:
    chunk = draw(CHUNKS)
    budgets = st.integers(1, max(32 // chunk, 2)).map(lambda n: n * chunk)
    gamma1, gamma2 = draw(GAMMAS)
    tree = draw(usually(st.just(""), TREES, odds=3))
    return {
        "method": draw(usually(one_of("triforce", *METHODS[2:]), one_of(*METHODS[:2]))),
        "policy": draw(usually(st.just("retrieval"), st.sampled_from(NAMES), odds=3)),
        "verification": draw(st.sampled_from(VERIFICATIONS)),
        "gamma1": gamma1,
        "gamma2": gamma2,
        "tree": tree,
        "budget": draw(usually(budgets, st.none(), st.just(chunk * 10**9), odds=9)),
        "chunk_size": chunk,
        "num_sink_tokens": draw(usually(st.integers(0, 6), one_of(20, 300, MAX_COUNT), odds=8)),
        "num_recent_tokens": draw(
            usually(st.integers(1, 40), one_of(252, 252, 10**5, MAX_COUNT), odds=5)
        ),
        "observation_window": draw(usually(st.integers(1, 20), one_of(64, 1023, 1024))),
        "rebuild_stride": draw(usually(st.integers(1, 30), one_of(256, MAX_COUNT))),
    }


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a distribution, at a temperature above 0."""
    return {
        "temperature": draw(st.one_of(one_of(0.8, 1.0, 0.3, 2.0, 1e-6, 100), st.floats(0.05, 5))),
        "top_k": draw(one_of(0, 40, 1, 2, 5, VOCAB - 1, VOCAB, 10**6)),
        "top_p": draw(st.one_of(one_of(1.0, 0.95, 0.5, 1e-9), st.floats(0.01, 1))),
        "min_p": draw(st.one_of(one_of(0.0, 0.0, 0.05, 1.0), st.floats(0, 1))),
    }


SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["She", "the sea", "é"]}, "n": {
"type": "integer"}}, "required": ["name"], "additionalProperties": false}"""
GRAMMARS = [
    Grammar("json_object"),
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(She|she)( had| was|,){2,9}[.!]"),
    Grammar("lark", 'start: word (" " word)*\nword: /[a-z]{1,9}/'),
    Grammar("choice", '["She had", "She had been", "the sea", "日本"]'),
]
END_TOKEN = 2


@st.composite
def text_filters(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of filters that look at a text, one or several."""
    penalties = usually(st.just(0.0), st.floats(-2, 2), odds=2)
    bias = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4)
    words = st.lists(one_of("She", "e", " the", "ha", "é", "1814", "\n"), max_size=3)
    return {
        "repetition_penalty": draw(usually(st.just(1.0), st.floats(0.5, 2), odds=2)),
        "presence_penalty": draw(penalties),
        "frequency_penalty": draw(penalties),
        "logit_bias": draw(usually(st.just({}), bias, odds=2)),
        "bad_words": draw(usually(st.just([]), words, odds=2)),
        "min_tokens": draw(usually(st.just(0), st.integers(1, 30), odds=3)),
        "grammar": draw(usually(st.none(), st.sampled_from(GRAMMARS), odds=2)),
    }


WRONG = {
    "speculation": {
        "method": ["triforc", None],
        "policy": ["lru", None, 5, ["h2o"], object()],
        "verification": ["blocks", None],
        "tree": ["0", "x", "4x", "x4", "65", "8x9", "-4", "4 x 3", "0x4", 16, None, "9" * 99],
        "gamma1": [0, 65, 10**12, 2.0, "3", True],
        "gamma2": [-1, 65, 10**30, 2.5],
        "budget": [0, -8, 7.5, "x", 12],
        "chunk_size": [0, 1025, None],
        "num_sink_tokens": [-1, 2**31, 0.5],
        "num_recent_tokens": [0, 10**30, None],
        "observation_window": [0, 1025, 10**23],
        "rebuild_stride": [0, 2**31, "often"],
        "coupled": [1, None],
    },
    "sampling": {
        "temperature": [-1, 1e-9, 1e-46, 101, math.nan, math.inf, "1", None, True],
        "top_k": [-1, 2.5, None],
        "top_p": [0, -0.1, 1.5, math.nan, None],
        "min_p": [-0.1, 1.5, math.nan, "0.1"],
        "repetition_penalty": [0, -1, math.nan, "1", True],
        "presence_penalty": [2.5, math.nan, None],
        "frequency_penalty": [-3, math.inf],
        "logit_bias": [{-1: 1}, {1: 101}, {1: math.nan}, [1], "1", {"a": 1}, 5],
        "bad_words": [("",), 3, ("\ud800",)],
        "min_tokens": [-1, 1.5, None],
        "grammar": ["x", 3, {}],
    },
    "generation": {
        "max_new_tokens": [0, 8.0, True, 2**31, None],
        "prefill_chunk": [0, 2**31, None],
        "stop": [("",), ("ok", ""), ("\ud800",), (3,), 3, {"END"}],
        "logprobs": [-1, 21, 2.5, True],
        "offload": [1],
        "ignore_eos": [1, None, "yes"],
        "on_chip": [0, -1, 1.5],
    },
}
"""Values to be refused."""


@st.composite
def stop_strings(draw: st.DrawFn, num_rows: int) -> dict[str, Any]:
    """Stop strings of all kinds, and tokens that end a text."""
    letters = st.text(st.sampled_from("e b�nS"), min_size=1, max_size=3)
    places = st.tuples(st.integers(0, num_rows - 1), st.integers(0, 60), st.integers(1, 6))
    ends = st.tuples(st.integers(0, num_rows - 1), st.integers(0, 40))
    kind = draw(st.integers(0, 3))
    return {
        "stop": tuple(draw(st.lists(letters, max_size=2))) if kind == 1 else (),
        "stops_in_text": tuple(draw(st.lists(places, min_size=1, max_size=3))) if kind > 1 else (),
        "eos_in_text": tuple(draw(st.lists(ends, max_size=2)) if draw(st.booleans()) else ()),
    }


@st.composite
def cases(draw: st.DrawFn, odds: int = 3) -> Case:
    """Any greedy or coupled run; one in `odds` has filters that look at the text."""
    num_rows = draw(st.integers(1, 4))
    lengths = usually(st.integers(1, 150), st.integers(1, 400), st.just(1))
    kinds = usually(st.just(VOCAB), one_of(1, 2, 5), odds=3)
    prompt = st.builds(PromptSpec, lengths, st.integers(0, 10**6), kinds)
    speculation = draw(speculations())
    drafter = draw(st.sampled_from(DRAFTERS))
    if drafter != "ngram" and draw(st.integers(0, 9)):  # else some windows would be refused
        for name, value in ORDINARY_WINDOW.items():
            speculation[name] = min(speculation[name], value)
    is_greedy = draw(st.booleans())
    sampling = {} if is_greedy else draw(filters())
    if draw(st.integers(1, odds)) == 1:
        sampling |= draw(text_filters())
    speculation["coupled"] = not is_greedy or draw(st.booleans())
    seeds = usually(
        st.integers(0, 2**31), one_of(0, MAX_SEED - num_rows + 1, MAX_SEED, -1), odds=10
    )
    num_passes = (speculation["gamma1"] or 4) * (speculation["gamma2"] or 6)
    num_new = draw(usually(st.integers(1, 40), st.integers(41, 120)))
    generation = {
        "max_new_tokens": min(num_new, max(MAX_PASSES // num_passes, 3)),
        "prefill_chunk": draw(
            usually(st.integers(8, 100), st.integers(1, 7), one_of(1024, MAX_COUNT), odds=3)
        ),
        "ignore_eos": draw(usually(st.just(False), st.just(True))),
    }
    settings = {"sampling": sampling, "generation": generation, "speculation": speculation}
    stops = draw(stop_strings(num_rows))
    if sampling.get("grammar") or sampling.get("min_tokens"):
        stops["eos_in_text"] = ()
    if draw(usually(st.just(False), st.just(True), odds=20)):
        part = draw(st.sampled_from(sorted(WRONG)))
        name = draw(st.sampled_from(sorted(WRONG[part])))
        settings[part][name] = draw(st.sampled_from(WRONG[part][name]))
    slack = draw(usually(one_of(0, 0, 1, 7, 300), st.just(-1), odds=20))
    return Case(
        drafter=drafter,
        prompts=tuple(draw(prompt) for _ in range(num_rows)),
        seed=draw(st.one_of(seeds, st.tuples(*[st.integers(0, MAX_SEED)] * num_rows))),
        slack=slack,
        **settings,
        **stops,
        plan_seed=draw(st.one_of(st.integers(0, 10**6), st.none())),
        row=draw(st.integers(0, num_rows - 1)),
    )


@functools.cache
def base_target() -> Llama:
    return tiny_model(CONFIG)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizersBackend(byte_level_tokenizer()), None)


@functools.cache
def drafter(name: str) -> Llama | None:
    """The model of a name in DRAFTERS; None: n-grams."""
    target = base_target()
    if name in ("ngram", "the target itself"):
        return None if name == "ngram" else target
    if name == "unrelated":
        return tiny_model(dataclasses.replace(CONFIG, num_layers=1), seed=5)
    if name == "trimmed head":
        return trimmed_copy(target, range(0, VOCAB - 2, 3))
    if name.endswith("vocabulary"):
        size = VOCAB + 77 if name == "larger vocabulary" else 200
        return tiny_model(dataclasses.replace(CONFIG, vocab_size=size))
    model = near_copy(target, 0.02)
    if name == "short context":
        model.config = dataclasses.replace(CONFIG, context_length=100)
    return model


def make_engine(case: Case, eos: tuple[int, ...] = ()) -> Engine:
    """The engine of a case; the target's context ends `slack` after the longest output."""
    num_new = case.generation["max_new_tokens"]
    num_new = num_new if isinstance(num_new, int) and 0 < num_new < 1000 else 1
    context = max(max(prompt.length for prompt in case.prompts) + num_new + case.slack, 1)
    target = copy.copy(base_target())  # shares the weights
    config: ModelConfig = dataclasses.replace(CONFIG, context_length=context)
    target.config = dataclasses.replace(config, eos_token_ids=eos)
    return Engine(target, tokenizer(), drafter(case.drafter))
