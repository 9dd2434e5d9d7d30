"""A prompt read layer by layer leaves what it would leave chunk by chunk; no byte goes twice."""

import pytest
import torch

from minitri.core.prefill import prefill
from tests.conftest import tiny_model
from tests.core.rigs import WARM, Rig, new_cache, random_prompt
from tests.devices.gpu_twins.conftest import SMALL
from tests.devices.gpu_twins.offload import CONFIG, TOKEN, Traffic, assert_same, offloaded

PROMPT = random_prompt(CONFIG, 200)


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
def test_nothing_travels_twice(on_chip):
    """To the host every token once per layer; to the device nothing."""
    full, hosted = offloaded(on_chip, 1), CONFIG.num_layers - on_chip
    with Traffic(full) as traffic:
        list(prefill(tiny_model(CONFIG), PROMPT, full, 0, chunk=16))
    assert (traffic.to_host, traffic.to_device) == (hosted * 199 * TOKEN, 0)


@pytest.mark.parametrize(
    ("window", "chunk", "length"),
    [(1, 16, 65), (16, 16, 65), (16, 7, 200), (48, 16, 3), (48, 16, 200), (200, 64, 200)],
)
def test_the_retrieval_cache_is_as_if_it_had_seen_every_chunk(window, chunk, length, monkeypatch):
    """The latest queries, so the same slots are chosen, and guesses are accepted alike."""
    model, rigs = tiny_model(CONFIG), []
    settings = {"method": "retrieval", "observation_window": window, "prefill_chunk": chunk}
    settings |= {"sampling": WARM, "num_new": 12, **SMALL}
    for _ in range(2):
        rigs.append(Rig(model, [PROMPT[:length]], full=offloaded(1, 1), **settings))
        # As other caches are read: every chunk through all layers.
        monkeypatch.setattr("minitri.core.prefill.OffloadedFullCache", type(None))
    assert torch.equal(*(rig.small._queries[0] for rig in rigs))
    for rig in rigs:
        rig.start()
    held = rigs[0].small.lengths[0]
    for name in ("keys", "values"):
        assert torch.equal(*(getattr(rig.small, name)[..., :held, :] for rig in rigs))
    assert rigs[0].run() == rigs[1].run()


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
            list(prefill(model, prompt, full, b, chunk=16))
    assert_same(ours, exact)
