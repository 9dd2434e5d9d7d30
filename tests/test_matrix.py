"""One matrix: the text of a seed, greedy or coupled, equals the autoregressive one in every way.

A way is a method with its settings and its drafter; a use is how requests reach the engine.
"""

import dataclasses

import pytest

from minitri import Engine, GenerationConfig, Request, SamplingParams, SpeculationConfig
from tests.cascades import texts_of, tiny_engine
from tests.conftest import tiny_model
from tests.core.policies import policy_of
from tests.core.rigs import Rig, near_copy, plain_tokens, random_prompt, tiny_config
from tests.devices.gpu_twins.offload import offloaded

SMALL = {"budget": 32, "chunk_size": 8, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3}
FREE = {**SMALL, "gamma1": None, "gamma2": None}
SINGLE = {**SMALL, "budget": 8, "num_recent_tokens": 1, "gamma1": 1, "gamma2": 1}
OFTEN = {**SMALL, "budget": 16, "chunk_size": 1, "rebuild_stride": 7}
LONG = {**SMALL, "budget": 128, "chunk_size": 4, "num_recent_tokens": 200, "gamma1": 5, "gamma2": 9}
LENGTH = GenerationConfig(32, ignore_eos=True, prefill_chunk=16)


class Echo:
    """A drafter from outside: the token before the last one."""

    def guess(self, tokens: list[int], row: int) -> int:
        return tokens[-2] if len(tokens) > 1 else tokens[0]


def ways() -> dict[str, tuple[str, dict]]:
    """The drafter and the settings of each way to speculate."""
    found = {
        f"{method}, {drafter}": (drafter, {"method": method, **SMALL})
        for method in ("naive", "retrieval", "triforce")
        for drafter in ("near", "other", "lookup", "plug-in", "fewer tokens")
        if method != "retrieval" or drafter == "near"
    }
    sizes = {"single guesses": SINGLE, "rebuilt often": OFTEN, "long guesses": LONG}
    for name, size in sizes.items():
        found[f"triforce, {name}"] = ("other", {"method": "triforce", **size})
        found[f"naive, {name}"] = ("lookup", {"method": "naive", **size})
    for policy in ("streaming", "topk", "received"):
        settings = {"method": "triforce", "policy": policy, **OFTEN}
        found[f"triforce, {policy}"] = ("near", settings)
    found["triforce, plug-in, tree 4"] = ("plug-in", {"method": "triforce", "tree": "4", **SMALL})
    by_token = {"method": "triforce", "verification": "token", **SMALL}
    found["triforce, by token"] = ("near", by_token)
    trees = "naive 7, naive 3x2, naive 8x1, triforce 1, triforce 20, triforce 1x3, retrieval 7"
    for way in f"{trees}, auto , auto 3x2".split(", "):
        method, tree = way.split(" ")
        size = FREE if "x" in tree or method == "auto" else SMALL
        found[f"{method}, tree {tree}"] = ("near", {"method": method, "tree": tree, **size})
    return found


WAYS = ways()


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    """The engine of every drafter, all with one target."""
    engine = tiny_engine(noise=0.02)
    target, config = engine.model, engine.config
    drafts = {
        "near": engine.models.draft,
        "other": tiny_model(dataclasses.replace(config, num_layers=1), seed=5),
        "lookup": None,
        "fewer tokens": tiny_model(dataclasses.replace(config, vocab_size=200), seed=0),
    }
    found = {name: Engine(target, engine.tokenizer, draft) for name, draft in drafts.items()}
    return {**found, "plug-in": Engine(target, engine.tokenizer, drafter=Echo())}


def requests_of(engine: Engine, sampling: SamplingParams) -> list[Request]:
    """Long and short prompts, one of a single token, one all repetition."""
    prompts = [random_prompt(engine.config, n, seed=n) for n in (3, 90, 1)] + [[4] * 20]
    return [Request(prompt, 7 + b, sampling, LENGTH) for b, prompt in enumerate(prompts)]


def in_a_batch(engine, requests, speculation):
    settings = {"sampling": requests[0].sampling, "generation": LENGTH, "speculation": speculation}
    return texts_of(engine.generate([it.prompt for it in requests], seed=7, **settings))


def admitted(engine, requests, speculation):
    """One after the other into two rows, while the other row goes on."""
    return texts_of(engine.stream(requests, batch_size=2, speculation=speculation))


def after_a_prefix(engine, requests, speculation):
    """After a text that begins as the longest prompt does."""
    longest = max((it.prompt for it in requests), key=len)
    earlier = Request([*longest[:60], 5, 6], 0, requests[0].sampling, LENGTH)
    return texts_of(engine.stream([earlier, *requests], batch_size=1, speculation=speculation))[1:]


@pytest.mark.parametrize("use", [in_a_batch, admitted, after_a_prefix])
@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_autoregressive_one(engines, way, coupled, use):
    drafter, settings = WAYS[way]
    engine, sampling = engines[drafter], SamplingParams(0.8, 40, 0.95) if coupled else None
    requests = requests_of(engine, sampling or SamplingParams())
    alone = SpeculationConfig("autoregressive", coupled=coupled)
    wanted = in_a_batch(engine, requests, alone)
    policy = policy_of(settings.get("policy", "retrieval"))
    speculation = SpeculationConfig(**{**settings, "policy": policy, "coupled": coupled})
    assert use(engine, requests, speculation) == wanted


@pytest.mark.parametrize("on_chip", [0, 1, 2])
@pytest.mark.parametrize("way", ["naive", "retrieval", "triforce", "naive 9", "triforce 9"])
def test_kv_in_host_memory_changes_no_text(way, on_chip):
    config = tiny_config(num_layers=3)
    target, (method, _, tree) = tiny_model(config), way.partition(" ")
    full = offloaded(on_chip, config=config)
    prompts = [random_prompt(config, n, seed=n) for n in (60, 1, 21)]
    settings = {"sampling": SamplingParams(0.9, 20, 0.95), "coupled": True, **SMALL}
    how = {"draft": near_copy(target, 0.05), "method": method, "tree": tree, "full": full}
    rig = Rig(target, prompts, **how, **settings)
    assert rig.run() == plain_tokens(target, prompts, **settings)
    assert rig.stats.levels[-1].num_accepted_tokens > 10
