"""A prompt that is read layer by layer leaves what it would leave chunk by chunk, and nothing
travels twice."""

import pytest
import torch

from minitri import GenerationConfig, PrefillProgress, Request, SpeculationConfig, memory, runner
from minitri.runner import prefill
from tests.cascades import WARM, Rig, random_prompt, tiny_engine
from tests.conftest import new_cache, tiny_model
from tests.gpu_twins.offload import CONFIG, TOKEN, Traffic, assert_same, offloaded

PROMPT = random_prompt(CONFIG, 200)
RETRIEVAL = SpeculationConfig("retrieval", budget=24, gamma2=3, num_recent_tokens=40)


def by_chunks(monkeypatch) -> None:
    """As it was read before: every chunk through all layers, and so from host memory again."""
    monkeypatch.setattr(runner, "OffloadedFullCache", type(None))


@pytest.mark.parametrize("length", [1, 2, 17, 18, 33, 200])
@pytest.mark.parametrize("on_chip", [0, 2, 4])
def test_k_and_v_are_those_of_a_cache_on_the_device(length, on_chip):
    """The same bits, wherever the last chunk of 16 ends, after another row; progress, too."""
    model = tiny_model(CONFIG)
    exact, ours = new_cache(CONFIG, 2, 300), offloaded(on_chip, 2)
    for b, prompt in ((1, PROMPT[:50]), (0, PROMPT[:length])):
        ends = [list(prefill(model, prompt, full, b, chunk=16)) for full in (exact, ours)]
        assert ends[0] == ends[1]
        assert_same(ours, exact)


@pytest.mark.parametrize("on_chip", [0, 2])
def test_nothing_travels_twice(on_chip, monkeypatch):
    """To the host every token once per layer; to the device nothing, where chunks fetched every
    prefix again, but for a layer that was still in its buffer."""
    model, hosted = tiny_model(CONFIG), CONFIG.num_layers - on_chip
    counts = []
    for is_old in (False, True):
        if is_old:
            by_chunks(monkeypatch)
        full = offloaded(on_chip, 1)
        with Traffic(full) as traffic:
            list(prefill(model, PROMPT, full, 0, chunk=16))
        counts.append((traffic.to_host, traffic.to_device))
    assert counts[0] == (hosted * 199 * TOKEN, 0)
    assert counts[1][0] == hosted * 199 * TOKEN
    assert counts[1][1] >= (hosted - 1) * sum(range(16, 199, 16)) * TOKEN


@pytest.mark.parametrize(
    ("window", "chunk"), [(1, 16), (16, 16), (16, 20), (16, 7), (5, 3), (48, 16), (200, 64)]
)
@pytest.mark.parametrize("length", [3, 64, 65, 200])
def test_the_retrieval_cache_is_as_if_it_had_seen_every_chunk(window, chunk, length, monkeypatch):
    """The latest queries, so the very same slots are chosen, and the drafter's guesses are
    accepted alike."""
    model, rigs = tiny_model(CONFIG), []
    settings = {"method": "retrieval", "observation_window": window, "budget": 24, "num_new": 12}
    settings |= {"prefill_chunk": chunk, "num_recent_tokens": 60, "sampling": WARM}
    for read in (lambda patch: None, by_chunks):
        with monkeypatch.context() as patching:
            read(patching)
            rigs.append(Rig(model, [PROMPT[:length]], full=offloaded(1, 1), **settings))
    assert torch.equal(*(rig.small._queries[0] for rig in rigs))
    for rig in rigs:
        rig.start()
    held = rigs[0].small.lengths[0]
    for name in ("keys", "values"):
        assert torch.equal(*(getattr(rig.small, name)[..., :held, :] for rig in rigs))
    assert rigs[0].run() == rigs[1].run()


@pytest.mark.parametrize("on_chip", [0, 2])
@pytest.mark.parametrize("chunk_size", [1, 4, 8])
def test_means_of_staged_keys_are_those_that_are_kept(on_chip, chunk_size):
    """To the bit, and so are the chunks that are chosen; none are kept next to a cache in host
    memory."""
    settings = {"method": "retrieval", "budget": 24, "chunk_size": chunk_size, "num_new": 30}
    settings |= {"num_recent_tokens": 60, "rebuild_stride": 3, "gamma2": 3}
    whole, ours = (
        Rig(tiny_model(CONFIG), [PROMPT], full=full, **settings)
        for full in (None, offloaded(on_chip, 1))
    )
    policy, N = whole.small._policy, 199 // chunk_size
    assert ours.small._policy._means.numel() == 0
    for layer, (keys_KSD, _) in enumerate(ours.full.layers(0)):
        units_KNMD = keys_KSD[:, : N * chunk_size].unflatten(1, (N, chunk_size))
        assert torch.equal(units_KNMD.mean(2), policy._means[layer, 0, :, :N])
    assert ours.start() == whole.start()
    while any(whole.cascade.active):
        assert ours.step() == whole.step()
        held = whole.small.lengths[0]
        assert torch.equal(ours.small.keys[..., :held, :], whole.small.keys[..., :held, :])
    assert ours.stats.num_rebuilds == whole.stats.num_rebuilds > 5


def test_a_policy_that_wants_the_whole_prompt_reads_it_chunk_by_chunk():
    """Queries of all tokens and layers would take as much memory as the keys."""
    model, seen = tiny_model(CONFIG), []
    for _ in prefill(model, PROMPT, offloaded(1, 1), 0, chunk=64, watch=seen.append):
        pass
    assert [queries_LTHD.shape[1] for queries_LTHD in seen] == [64, 64, 64, 7]


def test_a_reading_that_was_given_up_leaves_no_trace():
    """After any number of chunks; the row then reads another prompt."""
    model, other = tiny_model(CONFIG), random_prompt(CONFIG, 120, seed=4)
    exact, ours = new_cache(CONFIG, 2, 300), offloaded(1, 2)
    for num_chunks in (1, 5, 12):
        reading = prefill(model, PROMPT, ours, 0, chunk=16)
        for _ in range(num_chunks):
            next(reading)
        reading.close()
        assert ours.lengths == [0, 0]
        ours.reset(0)
    for full in (exact, ours):
        for b, prompt in enumerate((other, PROMPT)):
            for _ in prefill(model, prompt, full, b, chunk=16):
                pass
    assert_same(ours, exact)


def test_a_pass_between_two_layers_is_refused():
    model, full = tiny_model(CONFIG), offloaded(1, 2)
    reading = prefill(model, PROMPT, full, 0, chunk=16)
    next(reading)
    full.advance([0, 1])
    with pytest.raises(AssertionError, match="between two layers"):
        next(reading)


@pytest.mark.parametrize("method", ["autoregressive", "retrieval"])
def test_prompts_that_join_a_batch_are_read_to_their_ends(method, monkeypatch):
    """More requests than rows, so that some are read while other texts are under way; every text is
    that of a run alone on the device, and progress counts tokens."""
    engine = tiny_engine()
    speculation = SpeculationConfig(method, budget=24, num_recent_tokens=40)
    requests = [
        Request(random_prompt(engine.config, n, seed=n), generation=GenerationConfig(new))
        for n, new in ((90, 5), (33, 25), (120, 9), (2, 12), (64, 7))
    ]
    alone = [
        engine.complete(it.prompt, generation=it.generation, speculation=speculation)
        for it in requests
    ]
    monkeypatch.setattr(
        memory, "allocate_full_cache", lambda *_: offloaded(1, 2, config=engine.config)
    )
    chunked = GenerationConfig(prefill_chunk=16)
    run = engine.stream(requests, batch_size=2, generation=chunked, speculation=speculation)
    events = list(run)
    ends = {event.row: event.token_ids for event in events if hasattr(event, "token_ids")}
    assert [ends[row] for row in range(5)] == [it.token_ids for it in alone]
    progress = [(it.row, it.num_done) for it in events if isinstance(it, PrefillProgress)]
    assert progress[:6] == [(0, n) for n in (16, 32, 48, 64, 80, 90)]
    assert [done for row, done in progress if row == 2] == [*range(16, 120, 16), 120]
    first = events.index(PrefillProgress(2, 16, 120, 0))
    assert all(isinstance(event, PrefillProgress) for event in events[first : first + 8])
