"""The retrieval cache holds what its policy chose, exactly, and every token that has been committed
since."""

import itertools
import math
import random

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import NEIGHBOR
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.decoding.verification import Proposal
from minitri.core.model.llama import Block
from minitri.core.prefill import prefill
from minitri.core.settings import SamplingParams, SpeculationConfig
from tests.core.rigs import (
    Rig,
    near_copy,
    new_cache,
    policy_of,
    random_prompt,
    tiny_config,
    tiny_model,
)

CONFIG = tiny_config()
L, K, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.num_heads, CONFIG.head_dim
G = H // K
MODEL = tiny_model(CONFIG)
NEVER = 10**6


class Bench:
    """A retrieval cache over a full cache of random K and V, and a random query for each token."""

    def __init__(self, policy="retrieval", *, budget, capacity=400, **speculation) -> None:
        generator = torch.Generator().manual_seed(0)
        self.full = new_cache(CONFIG, 1, capacity)
        for slots in (self.full.keys, self.full.values):
            slots.copy_(torch.randn(slots.shape, generator=generator))
        self.queries = torch.randn(1, L, capacity, H, D, generator=generator) * 3
        settings = {"rebuild_stride": NEVER, "num_recent_tokens": 8, **speculation}
        self.speculation = SpeculationConfig("retrieval", policy=policy_of(policy), **settings)
        self.cache = RetrievalCache(self.full, MODEL, self.speculation, [budget])
        self.read(9)  # of an earlier text
        self.full.reset(0)
        self.cache.reset(0)

    def read(self, count: int) -> None:
        """The full cache reads on, and the retrieval cache observes what it asks for of it."""
        wanted = min(count, self.cache.max_prompt_queries or count)
        latest_LTHD = self._advance(count)[:, count - wanted :].clone()
        self.cache.observe(0, latest_LTHD)
        latest_LTHD.zero_()  # as later passes overwrite them

    def commit(self, count: int = 1) -> bool:
        """Both caches read on, after guesses; returns whether the retrieval cache was rebuilt."""
        self.cache.advance([count])
        latest_LTHD = self._advance(count).clone()
        was_rebuilt = self.cache.commit(0, latest_LTHD)
        latest_LTHD.zero_()
        self.cache.take_committed([True])
        return was_rebuilt

    def _advance(self, count: int) -> torch.Tensor:
        self.full.advance([count])
        end = self.full.lengths[0]
        return self.queries[0, :, end - count : end]

    def held(self) -> list[list[list[int]]]:
        """The token in each slot, by layer and KV head: K and V must be its own."""
        return [[self._held_by(layer, k) for k in range(K)] for layer in range(L)]

    def _held_by(self, layer: int, k: int) -> list[int]:
        small, large = (
            [slots[layer, 0, k, : cache.lengths[0]] for slots in (cache.keys, cache.values)]
            for cache in (self.cache, self.full)
        )
        tokens = torch.cdist(small[0], large[0]).argmin(1)
        assert all(torch.equal(a, z[tokens]) for a, z in zip(small, large, strict=True))
        return tokens.tolist()


def unit_scores(bench: Bench, name: str, layer: int, k: int, end: int) -> list[float]:
    """Importance of every whole unit of the first `end` tokens by the book, in plain loops."""
    M = bench.speculation.chunk_size
    keys_SD = bench.full.keys[layer, 0, k, :end]
    num_units = end // M

    def received(keys_ND, *queries_HD):
        """Attention of a group's heads to each of these keys, over all queries."""
        asking = [query_HD[h] for query_HD in queries_HD for h in range(k * G, k * G + G)]
        return sum((keys_ND @ query_D / math.sqrt(D)).softmax(0) for query_D in asking)

    if name == "retrieval":
        first = max(0, end + 1 - bench.speculation.observation_window)
        means = torch.stack([keys_SD[n * M : (n + 1) * M].mean(0) for n in range(num_units)])
        plain = received(means, *bench.queries[0, layer, first : end + 1]).tolist()
        return [max(own, NEIGHBOR * before) for before, own in itertools.pairwise([0, *plain])]
    total = torch.zeros(end)
    for t in range(end):
        total[: t + 1] += received(keys_SD[: t + 1], bench.queries[0, layer, t])
    return total[: num_units * M].view(-1, M).sum(1).tolist()


class Definition:
    """The token in each slot by the book, a list for every layer and KV head."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.bench, self.name = bench, name
        self.slots = {(layer, k): list[int]() for layer in range(L) for k in range(K)}
        self.num_committed, self.built_at = 0, -math.inf
        self.num_overwritten = bench.speculation.num_sink_tokens  # they come first until a build

    def commit(self, count: int) -> bool:
        """After the same commit of the bench; returns whether it had to rebuild."""
        budget, settings = self.bench.cache.rows[0].budget, self.bench.speculation
        end = self.bench.full.lengths[0]
        known = end - count
        is_half_overwritten = self.num_overwritten >= budget / 2
        is_old = known - self.built_at >= settings.rebuild_stride
        is_due = known > budget and (is_half_overwritten or is_old)
        if is_due:
            self.num_committed = known // settings.chunk_size * settings.chunk_size
            self.num_overwritten, self.built_at = 0, known
            for (layer, k), slots in self.slots.items():
                slots[:] = self.build(layer, k, known, end - self.num_committed)
        for token in range(self.num_committed, end):
            is_full = len(self.slots[0, 0]) == budget
            for slots in self.slots.values():
                place = self.num_overwritten % budget if is_full else len(slots)
                slots[place : place + 1] = [token]
            self.num_overwritten += is_full
        self.num_committed = end
        return is_due

    def build(self, layer: int, k: int, known: int, num_fresh: int) -> list[int]:
        """Whole units from the least important on; the order of those that are always kept is that
        of the cache, in which fresh tokens have overwritten the first slots."""
        held, settings = self.bench.held()[layer][k], self.bench.speculation
        M, scores = settings.chunk_size, unit_scores(self.bench, self.name, layer, k, known)
        C, N = len(held) // M, len(scores)
        recent = min(math.ceil(settings.num_recent_tokens / M), max(1, C // 4))
        sinks = min(math.ceil(settings.num_sink_tokens / M), C - recent)
        always = {*range(sinks), *range(N - recent, N)}
        others = sorted({*range(N)} - always, key=scores.__getitem__)
        chosen = others[len(others) - (C - len(always)) :]
        tokens = [t for n in chosen for t in range(n * M, (n + 1) * M)]
        assert {t // M for t in held[max(len(tokens), num_fresh) :]} <= always
        return [*tokens, *held[len(tokens) :]]


@pytest.mark.parametrize(
    ("name", "budget", "chunk_size", "prompt", "window", "stride"),
    [
        ("retrieval", 48, 8, 150, 16, NEVER),
        ("retrieval", 48, 8, 159, 200, 15),
        ("retrieval", 48, 1, 152, 1, 15),
        ("retrieval", 40, 8, 39, 4, NEVER),
        ("retrieval", 16, 4, 1, 9, NEVER),
        ("received", 48, 1, 159, 16, 30),
        ("received", 8, 8, 50, 16, NEVER),
        ("retrieval", 1, 1, 5, 16, NEVER),
        ("received", 32, 1, 69, 4, 15),
        ("received", 24, 8, 24, 16, NEVER),
    ],
)
def test_slots_hold_what_the_policy_chose_and_every_token_committed_since(
    name, budget, chunk_size, prompt, window, stride
):
    """Exactly, after every commit, asked by the latest queries: of one read, of several rounds, or
    of fewer than the window; budgets of one chunk, prompts that are no multiple of a chunk."""
    sizes = {"num_sink_tokens": 11, "observation_window": window, "rebuild_stride": stride}
    bench = Bench(name, budget=budget, chunk_size=chunk_size, **sizes)
    wanted, rng, num_builds = Definition(bench, name), random.Random(prompt), 0
    for count in (prompt // 2, prompt - prompt // 2):
        bench.read(count)
    for count in [1, *(rng.randint(1, 7) for _ in range(24))]:
        was_built = bench.commit(count)
        assert wanted.commit(count) == was_built
        num_builds += was_built
        held = bench.held()
        assert all(held[layer][k] == slots for (layer, k), slots in wanted.slots.items())
        assert len(set(held[0][0])) == len(held[0][0])
        assert bench.cache.num_tokens == bench.full.lengths
        assert bench.cache.lengths == [min(bench.full.lengths[0], budget)]
    assert num_builds >= 1


def test_the_queries_that_choose_are_those_that_attend():
    """Rotated at their positions, as the keys are."""
    target, asked, seen = tiny_model(CONFIG), [], []
    attend = target.attend
    target.attend = lambda q_BTHD, *rest: asked.append(q_BTHD) or attend(q_BTHD, *rest)
    how = {"chunk": 16, "watch": seen.append, "max_queries": 5}
    for _ in prefill(target, random_prompt(CONFIG, 201), new_cache(CONFIG, 1, 256), 0, **how):
        pass
    assert len(seen) > 10
    for number, queries_LTHD in enumerate(seen):
        latest_LTHD = torch.cat(asked[number * L : number * L + L])[:, -queries_LTHD.shape[1] :]
        assert torch.equal(queries_LTHD, latest_LTHD)


def test_what_is_read_after_the_chosen_stands_where_it_does_in_the_text():
    """The cache gives what the model gives over the very K and V that were chosen."""
    target, prompt = tiny_model(CONFIG), random_prompt(CONFIG, 201)
    rig = Rig(target, [prompt], method="retrieval", budget=32, sampling=SamplingParams(1.0))
    with torch.inference_mode():
        rig.start()
        text = [*rig.sequences[0], 7, 9]
        chosen = FullCache(rig.small.keys.clone(), rig.small.values.clone())
        chosen.restore(0, 32)
        guesses = Proposal.of([text[-2:]], torch.ones(1, 2, 1), [["draft"]])
        probs_BNV = rig.runners["retrieval"].next_probs([text[:-2]], [True], guesses).probs_BNV
        block = Block(torch.tensor([text[-3:]]), torch.tensor([[201, 202, 203]]))
        hidden_BTE = target.forward(block, chosen)
    assert torch.allclose(probs_BNV, target.logits(hidden_BTE).softmax(-1), atol=1e-6)


def test_layers_with_a_window_read_all_of_it_whatever_the_budget():
    """All guesses of a model that has no other layers are accepted, after rebuilds too."""
    target = tiny_model(tiny_config(sliding_window=40, sliding_layers=(0, 1)))
    prompts = [random_prompt(target.config, length) for length in (150, 61)]
    small = {"budget": 16, "rebuild_stride": 9, "chunk_size": 4, "num_recent_tokens": 40}
    draft = near_copy(target, 0.1)
    for how in ({"method": "retrieval"}, {"method": "triforce", "tree": "3x2", "gamma2": 8}):
        rig = Rig(target, prompts, draft=draft, **how, **small)
        assert rig.run() == Rig(target, prompts, method="autoregressive").run()
        top = rig.stats.levels[-1]
        assert rig.stats.num_rebuilds > 2
        assert top.num_accepted_tokens == top.num_tested_tokens > 30


def test_the_default_budget_is_a_quarter_of_the_prompt_within_limits():
    budgets = [SpeculationConfig(chunk_size=8).budget_for(n) for n in (1, 1024, 2050, 16384, 10**6)]
    assert budgets == [256, 256, 512, 4096, 4096]
    assert SpeculationConfig(chunk_size=100).budget_for(1) == 300
