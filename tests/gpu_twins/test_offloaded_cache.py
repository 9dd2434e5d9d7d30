"""The offloaded cache holds what the full cache holds, to the bit, and nothing but its events keeps
it so.

On a CPU copies happen at once, so a missing wait would never show. The twin here, `Recorder`, runs
everything in order, too, but keeps a vector clock for the computation and for the streams of
copies, notes which bytes every PyTorch operation reads and writes, and reports two operations on
the same bytes, one of them a write, that no chain of events puts in order.
"""

import contextlib
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.caches.full import FullCache
from minitri.gpu.offload.offloaded_cache import RING, OffloadedFullCache
from minitri.gpu.streams import Streams
from minitri.model.cache import BlockKV
from minitri.settings import METHODS
from tests.cascades import WARM, Rig, near_copy, plain_tokens, random_prompt
from tests.conftest import CPU, fill, new_cache, tiny_config, tiny_model
from tools.paper.baselines.policies import NAMES, policy_of

CONFIG = tiny_config(num_layers=5)
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (60, 3, 21)]
TOKEN = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
"""Bytes of K and V of a token in one layer."""


class Traffic(TorchDispatchMode):
    """Counts the bytes that travel between the device and the host memory of a cache."""

    def __init__(self, cache: OffloadedFullCache) -> None:
        super().__init__()
        self.host = cache._staging.host_PLBKSD
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            start = self.host.data_ptr()
            is_host = [start <= it.data_ptr() < start + self.host.nbytes for it in args[:2]]
            self.to_host += is_host[0] * args[0].nbytes
            self.to_device += is_host[1] * args[0].nbytes
        return func(*args, **(kwargs or {}))


def offloaded(
    on_chip: int, batch_size: int = 3, capacity: int = 512, streams=None, config=CONFIG, **settings
) -> OffloadedFullCache:
    return OffloadedFullCache.placed(
        config,
        batch_size,
        capacity,
        on_chip=on_chip,
        dtype=torch.float32,
        device=CPU,
        streams=streams or Streams(),
        **settings,
    )


class RaceError(AssertionError):
    """Two operations that nothing puts in order use the same bytes."""


class RecordedEvent:
    def __init__(self, recorder: "Recorder") -> None:
        self._recorder, self._clock = recorder, {}

    def record(self) -> None:
        self._clock = dict(self._recorder.clocks[self._recorder.current])

    def wait(self) -> None:
        clock = self._recorder.clocks[self._recorder.current]
        for stream, time in self._clock.items():
            clock[stream] = max(clock[stream], time)


class Recorder(TorchDispatchMode):
    """Streams, and a record of who touched which bytes when."""

    def __init__(self) -> None:
        super().__init__()
        names = ("compute", "to device", "to host")
        self.clocks = {name: dict.fromkeys(names, 0) for name in names}
        self.current = "compute"
        self.copies_wait = True
        self.watched: list[tuple[int, int]] = []
        self.history: list[tuple[int, int, bool, str, int]] = []
        self.num_ordered = 0
        """Pairs of operations of different streams on the same bytes that events put in order."""

    @contextlib.contextmanager
    def copying(self, way):
        queued = self.event()
        queued.record()
        self.current = way
        if self.copies_wait:
            queued.wait()
        yield
        self.current = "compute"

    def event(self) -> RecordedEvent:
        return RecordedEvent(self)

    def share(self, tensor) -> None:
        pass

    def watch(self, cache: OffloadedFullCache) -> None:
        staging = cache._staging
        tensors = [staging.host_PLBKSD, staging.ring_PLBKTD]
        tensors += [buffer.kv_PBKSD for buffer in staging.buffers]
        self.watched = [
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        touched = [
            (argument, schema.alias_info is not None and schema.alias_info.is_write)
            for argument, schema in zip(args, func._schema.arguments, strict=False)
            if isinstance(argument, torch.Tensor) and not func.is_view
        ]
        clock = self.clocks[self.current]
        clock[self.current] += 1
        for tensor, is_write in touched:
            self._touch(tensor, is_write, clock)
        return func(*args, **(kwargs or {}))

    def _touch(self, tensor, is_write: bool, clock: dict[str, int]) -> None:
        start = tensor.data_ptr()
        if not any(low <= start < high for low, high in self.watched) or not tensor.numel():
            return
        for start, end in spans(tensor):
            for low, high, was_write, stream, time in self.history:
                if low < end and start < high and (is_write or was_write):
                    if clock[stream] < time:
                        raise RaceError(f"{self.current} and {stream} use the same bytes")
                    self.num_ordered += stream != self.current
            self.history.append((start, end, is_write, self.current, clock[self.current]))


def spans(tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor, as intervals: a slice of all heads leaves out what is between."""
    starts, length = [tensor.data_ptr()], tensor.element_size()
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dims):
        step = stride * tensor.element_size()
        if len(starts) == 1 and step <= length:  # dense so far
            length += (size - 1) * step
        else:
            starts = [start + i * step for start in starts for i in range(size)]
    return [(start, start + length) for start in starts]


def record_run(
    break_event=lambda cache: None, *, on_chip: int = 1, num_buffers: int = 2, **settings
) -> Recorder:
    """A run through an offloaded cache, with events broken on purpose or not."""
    target, recorder = tiny_model(CONFIG), Recorder()
    with recorder:
        full = offloaded(on_chip, streams=recorder, num_buffers=num_buffers)
        recorder.watch(full)
        break_event(full)
        prompts = [
            *PROMPTS[:2],
            random_prompt(CONFIG, 2 * RING),
        ]  # of which some are no longer in the ring
        rig = Rig(
            target, prompts, full=full, num_new=12, prefill_chunk=RING + 20, budget=24, **settings
        )
        rig.run()
    return recorder


@pytest.mark.parametrize(("on_chip", "num_buffers"), [(0, 2), (0, 3), (1, 2), (1, 4), (4, 2)])
@pytest.mark.parametrize("method", ["autoregressive", "retrieval"])
def test_every_conflict_is_put_in_order_by_events(method, on_chip, num_buffers):
    recorder = record_run(method=method, on_chip=on_chip, num_buffers=num_buffers)
    assert recorder.num_ordered > 1000


def record_trees(break_event=lambda cache: None) -> None:
    """Guesses as trees, whose blocks are read and not kept, over buffers that keep their layer."""
    target, recorder = tiny_model(CONFIG), Recorder()
    with recorder:
        full = offloaded(3, streams=recorder)
        recorder.watch(full)
        break_event(full)
        block = torch.zeros(3, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
        for _ in range(3):
            for layer in range(5):
                full.update(layer, BlockKV(block, block, block))
        Rig(
            target,
            PROMPTS,
            draft=near_copy(target, 0.02),
            full=full,
            method="naive",
            tree="6",
            num_new=12,
            num_recent_tokens=60,
        ).run()


def test_trees_need_no_other_events():
    record_trees()


@pytest.mark.parametrize(
    ("name", "stream", "run"),
    [
        ("ready", "compute", lambda break_event: record_run(break_event, method="retrieval")),
        ("stored", "to device", lambda break_event: record_run(break_event, method="retrieval")),
        ("stored", "compute", record_trees),
    ],
)
def test_a_wait_that_is_missing_is_noticed(name, stream, run):
    def break_event(cache: OffloadedFullCache) -> None:
        recorder = cache._staging.streams
        for owner in [cache._staging] if name == "stored" else cache._staging.buffers:
            event = getattr(owner, name)
            event.wait = lambda wait=event.wait: recorder.current == stream or wait()

    with pytest.raises(RaceError):
        run(break_event)


@pytest.mark.parametrize("name", ["_fetch", "_write_back"])
def test_a_copy_that_does_not_wait_for_the_computation_is_noticed(name, monkeypatch):
    method = getattr(OffloadedFullCache, name)

    def hasty(cache: OffloadedFullCache, *settings):
        recorder = cache._staging.streams
        recorder.copies_wait = False
        done = method(cache, *settings)
        recorder.copies_wait = True
        return done

    monkeypatch.setattr(OffloadedFullCache, name, hasty)
    with pytest.raises(RaceError):
        record_run(method="retrieval")


def test_the_next_layer_is_on_its_way_before_this_one_is_waited_for():
    """The point of two buffers: when the computation waits for layer l, the copy of layer l + 1 has
    been queued."""
    cache = offloaded(1, batch_size=1)
    queued, seen = [], []
    fetch = cache._fetch
    cache._fetch = lambda layer: (queued.append(layer), fetch(layer))[1]
    for layer, buffer in ((1, 0), (2, 1), (3, 0), (4, 1)):
        cache._staging.buffers[buffer].ready.wait = lambda: seen.append(set(queued))
        block = torch.zeros(1, 2, CONFIG.num_kv_heads, CONFIG.head_dim)
        cache.update(layer, BlockKV(block, block, block))
        assert {layer, min(layer + 1, 4)} <= seen[-1]
    queued.clear()
    cache.advance([2])
    assert queued == [1, 2]


def assert_same(ours: OffloadedFullCache, theirs: FullCache) -> None:
    assert ours.lengths == theirs.lengths
    for b, length in enumerate(theirs.lengths):
        for exact, on_chip, host in zip(
            (theirs.keys, theirs.values),
            (ours.keys, ours.values),
            ours._staging.host_PLBKSD,
            strict=True,
        ):
            got = torch.cat((on_chip[:, b, :, :length], host[:, b, :, :length]))
            assert torch.equal(got, exact[:, b, :, :length])
        for start, end in ((0, length), (max(0, length - 9), length), (length // 2, length)):
            for got, exact in zip(
                ours.tokens(b, start, end), theirs.tokens(b, start, end), strict=True
            ):
                assert torch.equal(got, exact), (start, end)
        for got, exact in zip(ours.layers(b), theirs.layers(b), strict=True):
            assert all(
                torch.equal(a[:, :length], z[:, :length]) for a, z in zip(got, exact, strict=True)
            )


@pytest.mark.parametrize("on_chip", [0, 1, 3, 4])
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("method", METHODS[1:])
def test_offload_equals_the_full_cache_bitwise(method, policy, on_chip):
    """Tokens, acceptance, and after every step all that is held, ragged rows that end at different
    times included."""
    target = tiny_model(CONFIG)
    draft = near_copy(target, 0.02)
    settings = {"draft": draft, "method": method, "policy": policy_of(policy), "sampling": WARM}
    settings |= {"budget": 24, "num_new": 24, "gamma1": 2, "gamma2": 3}
    settings |= {"prefill_chunk": 20, "num_recent_tokens": 60}
    theirs = Rig(target, PROMPTS, **settings)
    ours = Rig(target, PROMPTS, full=offloaded(on_chip), **settings)
    assert ours.start() == theirs.start()
    while any(theirs.cascade.active):
        assert_same(ours.full, theirs.full)
        assert ours.step() == theirs.step()
    assert ours.new_tokens() == theirs.new_tokens()
    counts = [
        [(s.num_tested_tokens, s.num_accepted_tokens) for s in rig.stats.stages]
        for rig in (ours, theirs)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_buffers_that_keep_their_layer_stay_true(num_layers):
    """With one or two hosted layers a buffer never changes its layer, and only what is new is
    copied."""
    config = tiny_config(num_layers=num_layers)
    target = tiny_model(config)
    full = offloaded(0, config=config)
    rig = Rig(
        target,
        PROMPTS,
        draft=near_copy(target, 0.05),
        full=full,
        method="naive",
        gamma1=3,
        num_new=30,
        num_recent_tokens=60,
    )
    assert rig.run() == plain_tokens(target, PROMPTS, num_new=30)
    buffers = full._staging.buffers
    assert len(buffers) == min(num_layers, 2)


def test_only_what_is_missing_travels():
    cache = offloaded(0, batch_size=1)
    block = torch.randn(1, 40, CONFIG.num_kv_heads, CONFIG.head_dim)
    for layer in range(5):
        cache.update(layer, BlockKV(block, block, block))
    copied = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default and args[0].dim() == 2:  # a head
                copied.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Sizes():
        cache.advance([30])
        assert copied == [30] * (2 * 2 * CONFIG.num_kv_heads)
        copied.clear()
        cache.crop([12])
        cache.advance([0])
        assert copied == []


def test_of_a_row_that_is_read_layer_by_layer_only_its_own_tokens_travel():
    cache = offloaded(0)
    block = torch.randn(3, 40, CONFIG.num_kv_heads, CONFIG.head_dim)
    for layer in range(5):
        cache.update(layer, BlockKV(block, block, block))
    cache.advance([40, 40, 40])
    with Traffic(cache) as traffic:
        layers = iter(cache.layers(1))
        for _ in range(5):
            keys_KSD, _ = next(layers)
            assert torch.equal(keys_KSD[:, :40], block[1].transpose(0, 1))
    assert traffic.to_device == 3 * 40 * TOKEN  # the first two layers were there


@pytest.mark.parametrize("on_chip", [0, 2])
@pytest.mark.parametrize("policy", ["retrieval", "streaming", "topk"])
@pytest.mark.parametrize("is_shown", [True, False])
def test_rebuilding_the_retrieval_cache_moves_nothing_over_the_link(policy, on_chip, is_shown):
    """In every step here; each layer travels once, because the rebuild is made while the pass of
    the target has it on the device. Without that, every step would need a second pass."""
    full, hosted = offloaded(on_chip, batch_size=1), 5 - on_chip
    num_steps = 0
    with Traffic(full) as traffic, torch.inference_mode():
        rig = Rig(
            tiny_model(CONFIG),
            [random_prompt(CONFIG, 90)],
            full=full,
            method="retrieval",
            policy=policy_of(policy),
            budget=24,
            rebuild_stride=1,
            gamma2=2,
            num_new=20,
        )
        if not is_shown:
            full.on_layer_staged = None
            rig.retrieval.selects_in_pass = False
        rig.start()
        # Two layers of five for the next pass; of three, one is left from reading, one from here.
        num_layers = {5: 7, 3: 3}[hosted]
        assert (traffic.to_device <= num_layers * 90 * TOKEN) == is_shown
        while any(rig.cascade.active):
            before, longest = traffic.to_device, full.lengths[0] + rig.speculation.max_block
            rig.step()
            num_steps += 1
            assert traffic.to_device > before
            assert (traffic.to_device - before <= hosted * longest * TOKEN) == is_shown
    assert rig.stats.num_rebuilds == num_steps + 1


def test_the_ring_holds_the_latest_tokens_of_blocks_of_any_size():
    cache, exact = offloaded(2, batch_size=2, capacity=900), new_cache(CONFIG, 2, 900)
    generator = torch.Generator().manual_seed(3)
    sizes = itertools.cycle([1, 5, RING - 1, 2, RING, 7, RING + 30, 1])
    for size in itertools.islice(sizes, 11):
        for layer in range(5):
            k, v = (
                torch.randn(2, size, CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator)
                for _ in range(2)
            )
            for full in (cache, exact):
                full.update(layer, BlockKV(k, k, v))
        keep = [int(torch.randint(1, size + 1, (1,), generator=generator)) for _ in range(2)]
        for full in (cache, exact):
            full.advance([size, size])
            full.crop(
                [length - size + kept for length, kept in zip(full.lengths, keep, strict=True)]
            )
        assert_same(cache, exact)


@pytest.mark.parametrize("on_chip", [0, 2])
def test_what_another_cache_holds_is_copied_to_the_bit_and_goes_on(on_chip):
    generator = torch.Generator().manual_seed(5)
    read, exact, cache = (
        new_cache(CONFIG, 2, 300),
        new_cache(CONFIG, 2, 400),
        offloaded(on_chip, batch_size=2),
    )

    def block(size):
        return torch.randn(2, size, CONFIG.num_kv_heads, CONFIG.head_dim, generator=generator)

    for layer in range(5):
        k, v = block(280), block(280)
        read.update(layer, BlockKV(k, k, v))
    read.advance([280, 131])
    for ours in (exact, cache):
        fill(ours, read)
    for size in (1, 3, 40):
        assert_same(cache, exact)
        for layer in range(5):
            k, v = block(size), block(size)
            got, wanted = (
                cache.update(layer, BlockKV(k, k, v)),
                exact.update(layer, BlockKV(k, k, v)),
            )
            for a, z in zip(got, wanted, strict=True):
                for b, length in enumerate(exact.lengths):
                    assert torch.equal(a[b, :, : length + size], z[b, :, : length + size])
        for ours in (exact, cache):
            ours.advance([size, size])
            ours.crop([length - size // 2 for length in ours.lengths])
    assert_same(cache, exact)


def test_more_than_it_holds_is_refused():
    cache = offloaded(0, batch_size=1, capacity=64)
    block = torch.zeros(1, 65, CONFIG.num_kv_heads, CONFIG.head_dim)
    with pytest.raises(IndexError, match="a block of 65 does not fit"):
        cache.update(0, BlockKV(block, block, block))
