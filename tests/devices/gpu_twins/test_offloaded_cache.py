"""The offloaded cache holds what the full cache holds, to the bit, and nothing but its events keeps
it so, see `recorder.py`; a prompt read layer by layer leaves what it would leave chunk by chunk."""

from itertools import pairwise

import pytest

from minitri.core.model.llama import Layers
from minitri.core.prefill import prefill
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.gpu import fused_modules
from minitri.devices.gpu.fused_modules import FusedLayers
from minitri.devices.replace import replace_modules
from tests.conftest import tiny_model
from tests.core.rigs import Rig, near_copy, new_cache, random_prompt
from tests.devices.gpu_twins.conftest import (
    CONFIG,
    PROMPTS,
    TOKEN,
    assert_same,
    check_blocks,
    offloaded,
    random_block,
)


@pytest.mark.parametrize(
    ("method", "on_chip", "tree"),
    [("autoregressive", 0, ""), ("retrieval", 1, ""), ("retrieval", 4, ""), ("naive", 3, "6")],
)
def test_every_conflict_is_put_in_order_by_events(method, on_chip, tree, recorder):
    """Blocks are not kept, buffers keep their layer, and rows are read after the run."""
    target, full = tiny_model(CONFIG), offloaded(on_chip)
    for layer in [*range(5)] * 3:
        full.update(layer, random_block(full, 4))
    prompts = [*PROMPTS[:2], random_prompt(CONFIG, 2 * LONGEST_BLOCK)]
    settings = {"num_new": 12, "prefill_chunk": LONGEST_BLOCK + 20, "budget": 24}
    settings |= {"method": method, "tree": tree, "draft": near_copy(target, 0.02)}
    Rig(target, prompts, full=full, num_recent_tokens=60, **settings).run()
    for layer in range(5):
        full.update(layer, random_block(full, 4))
    full.advance([4] * len(prompts))
    reads = full.held_layers(0) if method == "retrieval" else [full.tokens(0, 0, 9)]
    for keys, _ in reads:
        keys.sum()
    full.update(4, random_block(full, 4))
    full.write(4, 0, *random_block(full, 99).keys_BTKD[:2].transpose(1, 2))
    assert recorder.num_ordered > 200


def test_memory_is_not_freed_while_copies_use_it(recorder):
    full = offloaded(1)
    for layer in range(5):
        full.update(layer, random_block(full, 4))
    full.keep_path(0, [3, 2])
    full.advance([4] * 3)
    del full  # right after a pass over trees


def test_the_next_layer_is_on_its_way_before_this_one_is_waited_for():
    """Layer l + 1 is queued when the computation waits for layer l; after a pass nobody waits."""
    cache, seen = offloaded(1, batch_size=1), []
    for layer in range(1, 5):
        buffer = cache.buffers[(layer - 1) % 2]
        buffer.ready.wait = lambda: seen.append({it.layer for it in cache.buffers})
        cache.update(layer, random_block(cache, 2))
    assert seen == [{1, 2}, {2, 3}, {3, 4}, {3, 4}]
    cache.advance([2])
    assert {it.layer for it in cache.buffers} == {1, 2}
    assert len(seen) == 4


@pytest.mark.parametrize("on_chip", [0, 2])
def test_rebuilding_the_retrieval_cache_moves_nothing_over_the_link(on_chip, recorder):
    """Every step rebuilds here: the pass of the target has each layer on the device anyway."""
    full, hosted = offloaded(on_chip, batch_size=1), 5 - on_chip
    settings = {"budget": 24, "rebuild_stride": 1, "gamma2": 2}
    settings |= {"full": full, "method": "retrieval", "num_new": 20}
    full.layers = None  # which would fetch all of them once more
    traffic = []

    def note(rig) -> None:
        longest = full.lengths[0] + rig.speculation.max_block
        traffic.append((recorder.num_copied[full.host_LBSPKD.data_ptr()], hosted * longest * TOKEN))

    rig = Rig(tiny_model(CONFIG), [random_prompt(CONFIG, 90)], **settings)
    rig.run(note)
    # Two layers of five for the next pass; of three, one is left from reading, one from here.
    assert traffic[0][0] <= {5: 7, 3: 3}[hosted] * 90 * TOKEN
    for (before, most), (after, _) in pairwise(traffic):
        assert 0 < after - before <= most
    assert rig.stats.num_rebuilds == len(traffic)


@pytest.mark.parametrize("on_chip", [0, 2])
def test_what_another_cache_holds_is_copied_and_blocks_of_any_size_go_on(on_chip):
    """Copies are equal to the bit; the latest block stays on the device."""
    sizes = (1, 5, LONGEST_BLOCK - 1, 2, LONGEST_BLOCK, 7, LONGEST_BLOCK + 30, 1)
    check_blocks(offloaded(on_chip, 2, capacity=900), new_cache(CONFIG, 2, 900), sizes)


PROMPT = random_prompt(CONFIG, 200)


@pytest.mark.parametrize("length", [1, 2, 17, 18, 33, 200])
@pytest.mark.parametrize("on_chip", [0, 2, 4])
def test_k_and_v_are_those_of_a_cache_on_the_device(length, on_chip, monkeypatch):
    """Bits and progress are the same wherever the last chunk of 16 ends, after another row and a
    prompt that was given up, by the kernels between matrices too."""
    used = set()
    monkeypatch.setattr(fused_modules, "compiled", lambda function: used.add(function) or function)
    model = replace_modules(tiny_model(CONFIG), {Layers: FusedLayers})
    exact, ours = new_cache(CONFIG, 2, 300), offloaded(on_chip, 2)
    reading = prefill(model, PROMPT[::-1], ours, 0, chunk=16)
    for _ in range(1 + 5 * on_chip // 2):
        next(reading)
    assert len(used) == 3
    reading.close()
    assert ours.lengths == [0, 0]
    ours.reset(0)
    for b, prompt in ((1, PROMPT[:50]), (0, PROMPT[:length])):
        ends = [list(prefill(model, prompt, full, b, chunk=16)) for full in (exact, ours)]
        assert ends[0] == ends[1]
        assert_same(ours, exact)
