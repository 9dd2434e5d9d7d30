"""A CUDA device without a device: tensors have shapes, types and a device, but no numbers.

Whatever mixes devices, types or shapes fails as it would there, at the size of a real model. Where
the host asks for numbers it gets ones, so that a run goes on: of all guesses the first is accepted.
Streams, events and graphs do nothing. See `capture_lint.py` for the rules of a capture.
"""

import contextlib
import functools
import gc
from types import SimpleNamespace

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from minitri.core.offload import host_memory
from minitri.devices.gpu import attention_backends, fused_modules

DEVICE = torch.device("cuda:0")
GIB = 1 << 30
T = torch.Tensor
ONES = {T.__bool__: True, T.__int__: 1, T.__float__: 1.0, T.item: 1, T.__index__: 1}
BY_OPERATOR = {
    T.__invert__: torch.ops.aten.bitwise_not,
    T.contiguous: lambda x: torch.ops.aten.clone(x, memory_format=torch.contiguous_format),
}
"""What Python calls on the tensor's device."""


class ByShape(TorchFunctionMode):
    """Indexing and copies without what a PyTorch that has no CUDA would ask a device for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is T.__getitem__:
            return part_of(*args)
        if function is T.__setitem__:
            return copied(part_of(*args[:2]), torch.as_tensor(args[2]))
        if function is T.copy_:
            return copied(*args)
        if function in BY_OPERATOR:
            return BY_OPERATOR[function](*args)
        if function in ONES:
            return ONES[function]
        if function is not torch.tensor:
            return function(*args, **kwargs)
        device = kwargs.pop("device", "cpu")
        result = function(*args, **kwargs)
        result.constant = None  # else it would go on with the numbers
        return result.to(device)


def copied(target, source):
    """A copy, between devices and number types, of what can be broadcast."""
    assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
    return target


class Nothing:
    """A stream or an event."""

    device = DEVICE

    def __init__(self, *args, **kwargs) -> None: ...

    def record(self, *streams) -> None: ...

    wait = wait_stream = wait_event = synchronize = record

    def elapsed_time(self, other) -> float:
        return 1.0


def part_of(tensor, index):
    """The part of a tensor that an index takes."""
    index = index if isinstance(index, tuple) else (index,)
    num_named = sum(it is not None and it is not Ellipsis for it in index)
    dim, end, places = 0, tensor.dim() - num_named, {}
    for it in index:
        if it is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(it, int):
            tensor = tensor.select(dim, it)
            continue
        elif isinstance(it, slice):
            tensor = torch.ops.aten.slice(tensor, dim, it.start, it.stop, it.step or 1)
        elif it is not Ellipsis:
            places[dim] = torch.as_tensor(it)
        dim += end if it is Ellipsis else 1
    if not places:
        return tensor
    return torch.ops.aten.index(tensor, [places.get(n) for n in range(max(places) + 1)])


def ones_of(tensor: torch.Tensor):
    """Ones in lists, as many as a tensor has numbers."""
    made = 1
    for size in reversed(tensor.shape):
        made = [made] * size
    return made


class FakeCuda:
    """What of `torch.cuda` the package calls, on one device with so much memory."""

    def __init__(self, total_gib: float) -> None:
        self.total = int(total_gib * GIB)
        self.num_graphs = self.num_replays = 0
        self.num_cached = GIB  # bytes that boot checks have left to the allocator

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.total - self.num_cached, self.total

    def empty_cache(self) -> None:
        self.num_cached = 0

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream):
        assert not gc.isenabled()  # what is collected may free a graph
        yield
        self.num_graphs += 1

    def replay(self) -> None:
        self.num_replays += 1


@contextlib.contextmanager
def fake_cuda(monkeypatch, total_gib: float = 141.0):
    """Makes all tensors fakes, and `DEVICE` a device where they can be; kernels work there."""
    cuda = FakeCuda(total_gib)
    sizes = SimpleNamespace(multi_processor_count=132, total_memory=cuda.total)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_stream": Nothing,
        "device_of": lambda tensor: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: sizes,
        "graph_pool_handle": lambda: (0, 1),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Nothing,
        "Event": Nothing,
        "CUDAGraph": lambda: cuda,
        "synchronize": lambda device=None: None,
        **{name: getattr(cuda, name) for name in ("empty_cache", "mem_get_info", "graph")},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(FakeTensor, "tolist", ones_of)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("torch.nn.attention.bias.causal_lower_right", lambda *sizes: None)
    on_host = functools.partial(torch.empty, dtype=torch.uint8)
    monkeypatch.setattr(host_memory, "host_memory", lambda num_bytes, device: on_host(num_bytes))
    for module in (attention_backends, fused_modules):
        monkeypatch.setattr(module, "problem_with", lambda check: "")
    monkeypatch.setattr(fused_modules, "compiled", lambda function: function)
    with FakeTensorMode(), ByShape():
        yield cuda
