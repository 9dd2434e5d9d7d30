"""One matrix: the text of a seed, greedy or coupled, equals the autoregressive one in every way.

Its axes are the method with its settings and its drafter (a way), the weights of the retrieval
level, where the full cache is, how requests share a batch and what they reuse, and filters.
"""

import dataclasses
import functools

import pytest

from minitri import GenerationConfig, Request, SamplingParams
from tests.conftest import texts_of
from tests.core.rigs import policy_of, random_prompt
from tests.devices.gpu_twins.conftest import offloaded
from tests.strategies import engine_of

SMALL = {"budget": 32, "chunk_size": 8, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3}
FREE = {**SMALL, "gamma1": None, "gamma2": None}
SINGLE = {**SMALL, "budget": 8, "num_recent_tokens": 1, "gamma1": 1, "gamma2": 1}
OFTEN = {**SMALL, "budget": 16, "chunk_size": 1, "rebuild_stride": 7}
LONG = {**SMALL, "budget": 128, "chunk_size": 4, "num_recent_tokens": 200, "gamma1": 5, "gamma2": 9}
LENGTH = GenerationConfig(24, ignore_eos=True, prefill_chunk=16)


def way(
    method: str, drafter: str = "near copy", sizes: dict = SMALL, **settings
) -> tuple[str, dict]:
    """The drafter and the settings of a way to speculate."""
    return drafter, {"method": method, **sizes, **settings}


WAYS = {
    f"{method}, {drafter}": way(method, drafter)
    for method in ("naive", "triforce")
    for drafter in ("near copy", "unrelated", "lookup", "plug-in", "smaller vocabulary")
}
WAYS |= {
    "retrieval": way("retrieval"),
    "naive, single guesses": way("naive", "lookup", SINGLE),
    "triforce, single guesses": way("triforce", "unrelated", SINGLE),
    "triforce, rebuilt often": way("triforce", "unrelated", OFTEN),
    "triforce, long guesses": way("triforce", "unrelated", LONG),
    "triforce, received": way("triforce", sizes=OFTEN, policy="received"),
    "triforce, by token": way("triforce", verification="token"),
    "triforce, plug-in, tree 4": way("triforce", "plug-in", tree="4"),
    "auto": way("auto", sizes=FREE),
}
TREES = {"naive": ("7", "3x2"), "triforce": ("1", "20", "1x3"), "retrieval": ("7",)}
for method, tree in [*((it, tree) for it in TREES for tree in TREES[it]), ("auto", "3x2")]:
    WAYS[f"{method}, tree {tree}"] = way(method, sizes=FREE if "x" in tree else SMALL, tree=tree)
PENALTIES = {"repetition_penalty": 1.2, "logit_bias": {7: 4.0}, "bad_words": "e", "min_tokens": 9}


@functools.cache
def requests_of(*, coupled: bool) -> list[Request]:
    """Long and short prompts, one of a single token, one all repetition; each has its filters."""
    config = engine_of("lookup").config
    prompts = [random_prompt(config, n, seed=n) for n in (3, 90, 1)] + [[4] * 20]
    plain = SamplingParams(0.8, 40, 0.95) if coupled else SamplingParams()
    filters = [plain, dataclasses.replace(plain, **PENALTIES), plain, plain]
    if coupled:
        filters[3] = SamplingParams(1.2, min_p=0.02, frequency_penalty=0.5)
    rows = enumerate(zip(prompts, filters, strict=True))
    return [Request(prompt, 7 + b, sampling, LENGTH) for b, (prompt, sampling) in rows]


@functools.cache
def plain_texts(*, coupled: bool):
    stream = functools.partial(engine_of("lookup").stream, method="autoregressive", coupled=coupled)
    return [texts_of(stream([request]))[0] for request in requests_of(coupled=coupled)]


TURNS = [pytest.param(False, 0, id="greedy-0"), pytest.param(True, 0, id="coupled-0")]
TURNS += [pytest.param(True, 1, id="coupled-1", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("coupled", "turn"), TURNS)
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_autoregressive_one(way, coupled, turn, monkeypatch):
    """The other axes go round: the turns of a way have every size of a batch, and every place of
    the cache. An earlier text begins as the longest prompt, which is read after it or meanwhile."""
    drafter, settings = WAYS[way]
    policy = policy_of(settings.get("policy", "retrieval"))
    number = [*WAYS].index(way)
    batch_size = (4, 2, 1)[(number + coupled + turn) % 3]
    on_chip = (number // 3 - coupled - turn) % 3  # of two layers; 2: nothing is offloaded
    engine = engine_of(drafter, is_exact=number % 4 > 0)

    def allocate(target, needs, host=None):
        shape = needs.shape
        return offloaded(on_chip, shape.num_rows, shape.capacity, config=target.config)

    if on_chip < 2:
        monkeypatch.setattr("minitri.core.memory.allocate_full_cache", allocate)
    engine.release()
    requests = requests_of(coupled=coupled)
    begun = dataclasses.replace(requests[1], prompt=[*requests[1].prompt[:60], 5, 6], seed=0)
    how = {**settings, "policy": policy, "coupled": coupled, "prefill_chunk": 16}
    _, *texts = texts_of(engine.stream([begun, *requests], batch_size=batch_size, **how))
    engine.release()
    assert texts == plain_texts(coupled=coupled)
