"""One matrix: the text of a seed, greedy or coupled, equals the autoregressive one in every way.

Its axes are the method with its settings and its drafter (a way), the weights of the retrieval
level, where the full cache is, how requests share a batch and what they reuse, and filters.
"""

import dataclasses
import functools

import pytest

from minitri import Engine, GenerationConfig, Request, SamplingParams, SpeculationConfig
from tests.cascades import texts_of, tiny_engine
from tests.conftest import tiny_model
from tests.core.policies import policy_of
from tests.core.rigs import near_copy, random_prompt
from tests.devices.gpu_twins.offload import offloaded

SMALL = {"budget": 32, "chunk_size": 8, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3}
FREE = {**SMALL, "gamma1": None, "gamma2": None}
SINGLE = {**SMALL, "budget": 8, "num_recent_tokens": 1, "gamma1": 1, "gamma2": 1}
OFTEN = {**SMALL, "budget": 16, "chunk_size": 1, "rebuild_stride": 7}
LONG = {**SMALL, "budget": 128, "chunk_size": 4, "num_recent_tokens": 200, "gamma1": 5, "gamma2": 9}
LENGTH = GenerationConfig(24, ignore_eos=True, prefill_chunk=16)


class Echo:
    """A drafter from outside: the token before the last one."""

    def guess(self, tokens: list[int], row: int) -> int:
        return tokens[-2] if len(tokens) > 1 else tokens[0]


def ways() -> dict[str, tuple[str, dict]]:
    """The drafter and the settings of each way to speculate."""
    found = {
        f"{method}, {drafter}": (drafter, {"method": method, **SMALL})
        for method in ("naive", "triforce")
        for drafter in ("near", "other", "lookup", "plug-in", "fewer tokens")
    }
    found["retrieval"] = ("near", {"method": "retrieval", **SMALL})
    found["naive, single guesses"] = ("lookup", {"method": "naive", **SINGLE})
    sizes = {"single guesses": SINGLE, "rebuilt often": OFTEN, "long guesses": LONG}
    for name, size in sizes.items():
        found[f"triforce, {name}"] = ("other", {"method": "triforce", **size})
    for policy in ("streaming", "received"):
        settings = {"method": "triforce", "policy": policy, **OFTEN}
        found[f"triforce, {policy}"] = ("near", settings)
    found["triforce, plug-in, tree 4"] = ("plug-in", {"method": "triforce", "tree": "4", **SMALL})
    by_token = {"method": "triforce", "verification": "token", **SMALL}
    found["triforce, by token"] = ("near", by_token)
    trees = "naive 7, naive 3x2, triforce 1, triforce 20, triforce 1x3, retrieval 7"
    for way in f"{trees}, auto , auto 3x2".split(", "):
        method, tree = way.split(" ")
        size = FREE if "x" in tree or method == "auto" else SMALL
        found[f"{method}, tree {tree}"] = ("near", {"method": method, "tree": tree, **size})
    return found


WAYS = ways()
PENALTIES = {"repetition_penalty": 1.2, "logit_bias": {7: 4.0}, "bad_words": "e", "min_tokens": 9}


@functools.cache
def engine_of(drafter: str, *, is_exact: bool = True) -> Engine:
    """The engine of a drafter, all with one target; unless `is_exact` the retrieval level has other
    weights."""
    engine = target_engine()
    target = engine.model
    drafts = {
        "near": engine.models.draft,
        "other": tiny_model(dataclasses.replace(engine.config, num_layers=1), seed=5),
        "fewer tokens": tiny_model(dataclasses.replace(engine.config, vocab_size=200), seed=0),
    }
    proposing = None if is_exact else near_copy(target, 0.03, seed=3)
    plugged = Echo() if drafter == "plug-in" else None
    return Engine(target, engine.tokenizer, drafts.get(drafter), proposing, plugged)


target_engine = functools.cache(tiny_engine)


@functools.cache
def requests_of(*, coupled: bool) -> list[Request]:
    """Long and short prompts, one of a single token, one all repetition; each has its filters."""
    config = target_engine().config
    prompts = [random_prompt(config, n, seed=n) for n in (3, 90, 1)] + [[4] * 20]
    plain = SamplingParams(0.8, 40, 0.95) if coupled else SamplingParams()
    filters = [plain, dataclasses.replace(plain, **PENALTIES), plain, plain]
    if coupled:
        filters[3] = SamplingParams(1.2, min_p=0.02, frequency_penalty=0.5)
    rows = enumerate(zip(prompts, filters, strict=True))
    return [Request(prompt, 7 + b, sampling, LENGTH) for b, (prompt, sampling) in rows]


def in_a_batch(engine, requests, **how):
    return texts_of(engine.stream(requests, batch_size=4, **how))


def admitted(engine, requests, **how):
    """One after the other into two rows, while the other row goes on."""
    return texts_of(engine.stream(requests, batch_size=2, **how))


def after_a_prefix(engine, requests, **how):
    """After a text that begins as the longest prompt does."""
    earlier = dataclasses.replace(requests[1], prompt=[*requests[1].prompt[:60], 5, 6], seed=0)
    return texts_of(engine.stream([earlier, *requests], batch_size=1, **how))[1:]


@functools.cache
def plain_texts(*, coupled: bool):
    speculation = SpeculationConfig("autoregressive", coupled=coupled)
    requests = requests_of(coupled=coupled)
    return [texts_of(target_engine().stream([it], speculation=speculation))[0] for it in requests]


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_autoregressive_one(way, coupled, turn, monkeypatch):
    """The other axes go round: all three turns have every use, and every place of the cache."""
    drafter, settings = WAYS[way]
    policy = policy_of(settings.get("policy", "retrieval"))
    speculation = SpeculationConfig(**{**settings, "policy": policy, "coupled": coupled})
    number = [*WAYS].index(way)
    use = (in_a_batch, admitted, after_a_prefix)[(number + coupled + turn) % 3]
    on_chip = (number // 3 + turn) % 3  # of two layers; 2: nothing is offloaded
    engine = engine_of(drafter, is_exact=number % 4 > 0)

    def allocate(target, draft, shape, host=None):
        return offloaded(on_chip, shape.num_rows, shape.capacity, config=target.config)

    if on_chip < 2:
        monkeypatch.setattr("minitri.core.memory.allocate_full_cache", allocate)
    engine.release()
    how = {"speculation": speculation, "generation": GenerationConfig(prefill_chunk=16)}
    texts = use(engine, requests_of(coupled=coupled), **how)
    engine.release()
    assert texts == plain_texts(coupled=coupled)
