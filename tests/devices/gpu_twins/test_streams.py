"""What copies, clocks, locked memory and captures ask of CUDA; tests/gpu shows what it does."""

import gc
from contextlib import nullcontext
from threading import Thread
from unittest.mock import MagicMock, Mock

import pytest
import torch

from minitri.core.graphs import GraphPool
from minitri.core.memory import room_for
from minitri.core.offload import streams
from minitri.core.offload.streams import CopyStream, HostMemory, clock_of

CUDA = torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch) -> MagicMock:
    """Notes all calls of `torch.cuda`, in order."""
    cuda = MagicMock()
    cuda.stream.return_value = nullcontext()
    cuda.Event.return_value.elapsed_time.return_value = 250.0
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def test_copies_begin_after_the_work_that_was_queued_before(cuda):
    stream, tensor = CopyStream(CUDA), Mock()
    copies = cuda.Stream.call_args
    with stream.copying():
        stream.share(tensor)
    stream.event()
    tensor.record_stream.assert_called_once_with(cuda.Stream())
    cuda.Stream().wait_stream.assert_called_once_with(cuda.current_stream())
    names = [name for name, *_ in cuda.mock_calls]
    assert names.index("Stream().wait_stream") < names.index("stream") < names.index("Event")
    GraphPool(CUDA)  # of another priority, as PyTorch lends the same 32 streams of each in turns
    assert cuda.Stream.call_args != copies


def test_seconds_are_known_once_the_events_are_reached(cuda):
    clock, seconds = clock_of(CUDA), []
    with clock.timed(seconds.append):
        assert cuda.Event().record.call_count == 1
    assert (cuda.Event().record.call_count, seconds) == (2, [])
    for _ in range(2):  # the second time nothing is left
        clock.settle()
        assert seconds == [0.25]
    cuda.Event().synchronize.assert_called_once_with()


def test_a_block_is_locked_once_lent_again_and_unlocked_when_a_larger_one_takes_its_place(cuda):
    register, unregister = cuda.cudart().cudaHostRegister, cuda.cudart().cudaHostUnregister
    register.return_value = 0
    host, borrower = HostMemory(CUDA), Mock()
    block = host.lend(borrower, (3, 5), torch.float32)
    assert (block.shape, block.dtype, host.num_free_bytes) == ((3, 5), torch.float32, 0)
    address = block.data_ptr()
    register.assert_called_once_with(address, 60, 0)
    del borrower, block
    assert host.num_free_bytes == 60
    assert host.lend(Mock(), (60,), torch.uint8).data_ptr() == address
    assert (register.call_count, unregister.call_count) == (1, 0)
    host.lend(Mock(), (80,), torch.uint8).fill_(1)
    gc.collect()
    unregister.assert_called_once_with(address)
    assert (register.call_count, host.num_free_bytes, cuda.synchronize.call_count) == (2, 80, 4)


@pytest.mark.parametrize("can_pin", [True, False])
def test_memory_that_cannot_be_locked_is_pinned_by_pytorch_or_is_one_line(
    can_pin, cuda, monkeypatch, caplog
):
    cuda.cudart().cudaHostRegister.return_value = 2
    pinned = torch.zeros(8, dtype=torch.uint8)
    empty = Mock(return_value=pinned, side_effect=None if can_pin else RuntimeError)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError))
    block = streams.host_memory(8, CUDA)
    assert (block is pinned, block.nbytes, len(caplog.records)) == (can_pin, 8, not can_pin)


def test_a_graph_is_captured_after_warm_ups_and_without_garbage_collection(cuda, monkeypatch):
    """Captures alone hold up other threads' captures and waits. Failures leave no stream."""
    clear, ours, theirs, pool = Mock(), [], [], GraphPool(CUDA)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    early, *others = [
        Thread(target=streams.synchronize, args=(CUDA,)),
        Thread(target=GraphPool(CUDA).record, args=(lambda: theirs.append(gc.isenabled()),)),
        Thread(target=streams.synchronize, args=(CUDA,)),
        Thread(target=room_for, args=(MagicMock(device=CUDA), MagicMock())),
    ]

    def run() -> int:
        ours.append(gc.isenabled())
        for thread in {1: [early], 3: others}.get(len(ours), ()):
            thread.start()
            thread.join(0.02 if thread in others else 5)
        assert (cuda.synchronize.call_count, cuda.empty_cache.called) == (1, False)
        assert not any((theirs[2:], cuda.stream.called, cuda.Stream().wait_stream.mock_calls[1:]))
        return len(ours)

    assert pool.record(run) == (cuda.CUDAGraph().replay, 3)
    for thread in others:
        thread.join()
    assert (ours[2], theirs[2], gc.isenabled(), clear.call_count) == (False, False, True, 4)
    assert (cuda.synchronize.call_count, cuda.empty_cache.called) == (2, True)
    assert cuda.graph.call_args.kwargs["capture_error_mode"] == "thread_local"
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("invalidated")
    cuda.reset_mock()
    with pytest.raises(RuntimeError, match="invalidated"):
        pool.record(Mock())
    cuda.set_stream.assert_called_once_with(cuda.current_stream())
    cuda.current_stream().wait_stream.assert_called_once_with(cuda.Stream())
