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
from minitri.core.model.llama import Block
from minitri.core.settings import SamplingParams, SpeculationConfig
from tests.core.exactness import probs_after
from tests.core.policies import NAMES, policy_of
from tests.core.rigs import Rig, new_cache, plain_tokens, random_prompt, tiny_config, tiny_model

CONFIG = tiny_config()
L, K, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.num_heads, CONFIG.head_dim
G = H // K
NEVER = 10**6


class Bench:
    """A retrieval cache over a full cache of random K and V, with a random query for every token:
    no model."""

    def __init__(
        self, policy="retrieval", *, budget, capacity=400, batch_size=1, seed=0, **speculation
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.full = new_cache(CONFIG, batch_size, capacity)
        for slots in (self.full.keys, self.full.values):
            slots.copy_(torch.randn(slots.shape, generator=generator))
        self.queries = torch.randn(batch_size, L, capacity, H, D, generator=generator) * 3
        settings = {"rebuild_stride": NEVER, "num_recent_tokens": 8, **speculation}
        settings["policy"] = policy_of(policy)
        self.speculation = SpeculationConfig("retrieval", **settings)
        self.cache = RetrievalCache(
            self.full, self.speculation, budgets=[budget] * batch_size, num_heads=H
        )

    def read(self, count: int, b: int = 0) -> None:
        """The full cache reads on, and the retrieval cache observes what it asks for of it."""
        end = self._advance(count, b)
        wanted = min(count, self.cache.max_prompt_queries or count)
        self.cache.observe(b, self.queries[b, :, end - wanted : end])

    def commit(self, count: int = 1, b: int = 0) -> bool:
        """Both caches read on; returns whether the retrieval cache was rebuilt."""
        end = self._advance(count, b)
        return self.cache.commit(b, self.queries[b, :, end - count : end])

    def _advance(self, count: int, b: int) -> int:
        self.full.advance([count if b == other else 0 for other in range(len(self.full.lengths))])
        return self.full.lengths[b]

    def held(self, b: int = 0) -> list[list[list[int]]]:
        """By layer and KV head, which token stands in each slot: K and V must be its own."""
        return [[self._held_by(layer, b, k) for k in range(K)] for layer in range(L)]

    def _held_by(self, layer: int, b: int, k: int) -> list[int]:
        length, end = self.cache.lengths[b], self.full.lengths[b]
        small = [slots[layer, b, k, :length] for slots in (self.cache.keys, self.cache.values)]
        large = [slots[layer, b, k, :end] for slots in (self.full.keys, self.full.values)]
        tokens = torch.cdist(small[0], large[0]).argmin(1)
        assert all(torch.equal(a, z[tokens]) for a, z in zip(small, large, strict=True))
        return tokens.tolist()


def unit_scores(bench: Bench, name: str, layer: int, k: int, end: int, M: int) -> list[float]:
    """Importance of every whole unit of the first `end` tokens by the book, in plain loops."""
    keys_SD = bench.full.keys[layer, 0, k, :end]
    first = max(0, end + 1 - bench.speculation.observation_window)

    def received(keys_ND, *queries_HD):
        """Attention of a group's heads to each of these keys, over all queries."""
        asking = [query_HD[h] for query_HD in queries_HD for h in range(k * G, k * G + G)]
        return sum((keys_ND @ query_D / math.sqrt(D)).softmax(0) for query_D in asking)

    window = bench.queries[0, layer, first : end + 1]
    if name == "retrieval":
        means = torch.stack([keys_SD[n * M : (n + 1) * M].mean(0) for n in range(end // M)])
        plain = [0, *received(means, *window).tolist()]
        return [max(own, NEIGHBOR * before) for before, own in itertools.pairwise(plain)]
    if name == "received":
        total = torch.zeros(end)
        for t in range(end):
            total[: t + 1] += received(keys_SD[: t + 1], bench.queries[0, layer, t])
        return total.tolist()
    return [float(t) for t in range(end)]


def check_build(
    bench: Bench, name: str, *, budget: int, M: int, sinks: int, recent: int, count: int = 1
) -> None:
    """Slots after a build, which the pass over the last `count` tokens makes: whole units from the
    least important on, the first overwritten by the tokens after the last whole unit."""
    end = bench.full.lengths[0]
    known = end - count
    C, num_units = budget // M, known // M
    always = {*range(sinks), *range(num_units - recent, num_units)}
    tail = list(range(num_units * M, end))
    for layer, heads in enumerate(bench.held()):
        for k, slots in enumerate(heads):
            scores = unit_scores(bench, name, layer, k, known, M)
            others = sorted(set(range(num_units)) - always, key=lambda n: scores[n])
            chosen = others[len(others) - (C - len(always)) :]
            wanted = [t for n in chosen for t in range(n * M, (n + 1) * M)]
            assert slots[: len(tail)] == tail
            assert slots[len(tail) : len(wanted)] == wanted[len(tail) :], (layer, k)
            assert set(slots[len(wanted) :]) == {
                t for n in always for t in range(n * M, (n + 1) * M)
            }
            assert len(slots) == len(set(slots)) == budget


@pytest.mark.parametrize("length", [150, 152, 159])
@pytest.mark.parametrize(("name", "M"), [("retrieval", 8), ("retrieval", 1), ("streaming", 1)])
@pytest.mark.parametrize("window", [1, 16, 200])
def test_a_build_holds_exactly_what_the_policy_chooses(name, M, length, window):
    """Asked by one query, by those of the last two reads, or by more than there are."""
    sizes = {"num_sink_tokens": 4, "num_recent_tokens": 8, "observation_window": window}
    bench = Bench(name, budget=48, chunk_size=M, **sizes)
    for count in (100, length - 103, 2):  # 100 is more than the queries that H2O scores at once
        bench.read(count)
    assert bench.commit(1) == 1
    check_build(bench, name, budget=48, M=M, sinks=-(-4 // M), recent=8 // M)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("name", ["retrieval", "streaming", "received"])
def test_a_build_after_several_rounds_asks_the_latest_queries(name, window):
    """In blocks of several tokens, longer and shorter than the window."""
    M = 4 if name == "retrieval" else 1
    sizes = {"num_sink_tokens": 3, "num_recent_tokens": 4, "rebuild_stride": 15}
    bench = Bench(name, budget=32, chunk_size=M, observation_window=window, **sizes)
    bench.read(69)
    assert [bench.commit(count) for count in (1, 5, 2, 7, 1, 6, 3, 5)] == [1, 0, 0, 0, 1, 0, 0, 0]
    while not bench.commit(3):
        pass
    check_build(bench, name, budget=32, M=M, sinks=-(-3 // M), recent=4 // M, count=3)


@pytest.mark.parametrize("chunk_size", [1, 8])
def test_committed_tokens_overwrite_the_least_important_slots_first(chunk_size):
    bench = Bench(budget=48, chunk_size=chunk_size)
    bench.read(155)
    bench.commit(1)
    num_fresh, built = 155 % chunk_size + 1, bench.held()
    for count in (1, 3, 2, 1, 5):
        before = bench.full.lengths[0]
        assert bench.commit(count) == 0
        fresh = list(range(before - num_fresh, before + count))
        num_fresh += count
        for layer in range(L):
            for k in range(K):
                assert bench.held()[layer][k] == fresh + built[layer][k][num_fresh:]
    assert num_fresh >= 12


@pytest.mark.parametrize("budget", [16, 32])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("early", [0, 1])
def test_a_text_that_outgrows_the_budget_keeps_its_sinks(budget, count, early):
    """Until then it is in the order of the text, not of importance."""
    bench = Bench(budget=budget, chunk_size=4, num_sink_tokens=4, num_recent_tokens=4)
    bench.read(budget - 1 - early)
    assert bench.commit(1) == 0
    assert bench.held() == [[list(range(budget - early))] * K] * L
    assert bench.commit(count + early) == 0
    assert (
        bench.held()
        == [[[0, 1, 2, 3, *range(budget, budget + count), *range(4 + count, budget)]] * K] * L
    )
    assert bench.commit(1) == 1
    for heads in bench.held():
        for slots in heads:
            assert set(slots) >= {0, 1, 2, 3, budget + count}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("budget", "chunk_size", "prompt"),
    [(8, 8, 50), (8, 8, 3), (1, 1, 5), (4, 1, 30), (24, 8, 24), (16, 4, 33), (40, 8, 39)],
)
def test_every_token_since_the_last_build_is_held_once(name, budget, chunk_size, prompt):
    """Budgets of one chunk, chunks of one token, prompts that are no multiple of a chunk."""
    sizes = {"num_sink_tokens": 2, "num_recent_tokens": 3}
    bench = Bench(name, budget=budget, chunk_size=chunk_size, **sizes)
    bench.read(prompt - 1)
    built_at, rng = 0, random.Random(prompt)
    for count in [1, *(rng.randint(1, 7) for _ in range(30))]:
        was_built, end = bench.commit(count), bench.full.lengths[0]
        assert bench.cache.num_tokens == [end]
        assert bench.cache.lengths == [min(end, budget)]
        built_at = (end - count) // chunk_size * chunk_size if was_built else built_at
        for slots in itertools.chain(*bench.held()):
            assert len(set(slots)) == len(slots)
            assert set(slots) >= set(range(max(built_at, end - budget + 2), end))
            assert end > budget or slots == list(range(end))


@pytest.mark.parametrize(
    ("budget", "chunk_size", "prompt", "stride", "count", "wanted"),
    [  # at a stride
        (200, 1, 249, 5, 1, [1, *[0, 0, 0, 0, 1] * 3]),
        (200, 1, 249, 5, 3, [1, 0, 1, 0, 1]),
        # when half of it has been overwritten, by what is left of a chunk too
        (16, 1, 99, NEVER, 1, [1, *[0] * 7, 1, *[0] * 7, 1]),
        (16, 1, 99, NEVER, 3, [1, 0, 0, 1, 0, 0, 1]),
        (16, 8, 94, NEVER, 1, [1, 0, 1]),  # 95 tokens: 7 slots are taken by the last 7
        (300, 1, 309, NEVER, 4, [1, *[0] * 20]),  # not without a reason
    ],
)
def test_it_is_rebuilt_when_it_is_due(budget, chunk_size, prompt, stride, count, wanted):
    bench = Bench(budget=budget, chunk_size=chunk_size, rebuild_stride=stride)
    bench.read(prompt)
    assert [bench.commit(count) for _ in wanted] == wanted


def test_the_queries_that_choose_are_those_that_attend(monkeypatch):
    """Rotated at their positions, as the keys are."""
    target, asked, told = tiny_model(CONFIG), [], []
    attend = target.attend
    spy = lambda q_BTHD, *rest: asked.append(q_BTHD) or attend(q_BTHD, *rest)  # noqa: E731
    monkeypatch.setattr(target, "attend", spy)

    def noted(learn):
        def learn_and_note(cache, b, queries_LTHD):
            told.append(queries_LTHD.clone())
            latest_LTHD = torch.stack(asked[-L:])[:, b, -queries_LTHD.shape[1] :]
            assert torch.equal(queries_LTHD, latest_LTHD)
            return learn(cache, b, queries_LTHD)

        return learn_and_note

    for name in ("observe", "commit"):
        monkeypatch.setattr(RetrievalCache, name, noted(getattr(RetrievalCache, name)))
    sizes = {"budget": 48, "observation_window": 5}
    Rig(target, [random_prompt(CONFIG, 201)], method="retrieval", **sizes).start()
    assert len(told) > 10


def test_what_is_read_after_the_chosen_stands_where_it_does_in_the_text():
    """The cache gives what the model gives over the very K and V that were chosen."""
    target, sampling = tiny_model(CONFIG), SamplingParams(1.0)
    rig = Rig(
        target, [random_prompt(CONFIG, 201)], method="retrieval", budget=32, sampling=sampling
    )
    with torch.inference_mode():
        rig.start()
        text = [*rig.sequences[0], 7, 9]
        chosen = FullCache(rig.small.keys.clone(), rig.small.values.clone(), [32])
        probs_BNV = probs_after(rig.runners["retrieval"], text, 2)
        block = Block(torch.tensor([text[-3:]]), torch.tensor([[201, 202, 203]]))
        hidden_BTE = target.forward(block, chosen)
    assert torch.allclose(probs_BNV, target.logits(hidden_BTE).softmax(-1), atol=1e-6)


PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (60, 3, 21)]


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("method", ["retrieval", "triforce"])
def test_a_budget_for_the_whole_text_gives_the_full_cache(method, policy):
    """The same bits after every step; nothing is ever chosen, and no guess is rejected."""
    target = tiny_model(CONFIG)

    def compare(rig):
        for b, length in enumerate(rig.full.lengths):
            if rig.cascade.active[b]:
                assert rig.small.lengths[b] == length
                for kind in ("keys", "values"):
                    small, large = (getattr(it, kind)[:, b] for it in (rig.small, rig.full))
                    assert torch.equal(small[:, :, :length], large[:, :, :length])

    rig = Rig(target, PROMPTS, method=method, policy=policy_of(policy), budget=112)
    assert rig.run(compare) == plain_tokens(target, PROMPTS)
    top = rig.stats.levels[-1]
    assert rig.stats.num_rebuilds == 0
    assert top.num_accepted_tokens == top.num_draft_tokens > 0


def test_the_default_budget_is_a_quarter_of_the_prompt_within_limits():
    budgets = [SpeculationConfig(chunk_size=8).budget_for(n) for n in (1, 1024, 2050, 16384, 10**6)]
    assert budgets == [256, 256, 512, 4096, 4096]
    assert SpeculationConfig(chunk_size=100).budget_for(1) == 300
    assert SpeculationConfig(budget=16).budget_for(10**6) == 16
