"""A CUDA device without a device: tensors have shapes, types and a device, but no numbers.

Whatever mixes devices, types or shapes fails as it would there, at the size of a real model. Where
the host asks for numbers it gets ones, so that a run goes on: of all guesses the first is accepted.
Streams, events and graphs do nothing, but keep the rules of a capture.
"""

import contextlib
import gc
import importlib
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from minitri.core.offload import host_memory
from minitri.devices import gpu
from minitri.devices.gpu import fused_modules, kernels

DEVICE = torch.device("cuda:0")
GIB = 1 << 30
GRID_LIMITS = (2**31 - 1, 65535, 65535)
"""Programs of a launch in each dimension."""
T = torch.Tensor
ONES = {T.__bool__: True, T.__int__: 1, T.__float__: 1.0, T.item: 1, T.__index__: 1}
BY_OPERATOR = {
    T.__invert__: torch.ops.aten.bitwise_not,
    T.contiguous: lambda x: torch.ops.aten.clone(x, memory_format=torch.contiguous_format),
}
"""What Python calls on the tensor's device."""
FROM_HOST = {torch.tensor, torch.as_tensor, T.cpu, T.numpy, T.nonzero, torch.nonzero}
"""What a capture may not do, next to asking for a number."""


class ByShape(TorchFunctionMode):
    """Indexing and copies without what a PyTorch that has no CUDA would ask a device for."""

    def __init__(self, cuda: "FakeCuda") -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = self.result(function, args, dict(kwargs or {}))
        if any(isinstance(it, T) and it.device != DEVICE for it in tree_leaves(result)):
            self.cuda.check(f"{function.__name__} on the host")
        return result

    def result(self, function, args, kwargs):
        if function is T.__getitem__:
            return self.cuda.part_of(*args)
        if function is T.__setitem__:
            return copied(self.cuda.part_of(*args[:2]), torch.as_tensor(args[2]))
        if function is T.copy_:
            return copied(*args)
        if function in BY_OPERATOR:
            return BY_OPERATOR[function](*args)
        if function in ONES or function in FROM_HOST:
            self.cuda.check(function.__name__)
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


class FakeCuda:
    """What of `torch.cuda` the package calls, on one device with so much memory."""

    def __init__(self, total_gib: float) -> None:
        self.total = int(total_gib * GIB)
        self.num_graphs = self.num_replays = 0
        self.is_capturing = False
        self.captured: list[str] = []
        """Names of functions of tensors that graphs hold."""
        self.num_cached = GIB  # bytes that boot checks have left to the allocator
        self.host_sizes: list[int] = []

    def host_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.host_sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.total - self.num_cached, self.total

    def empty_cache(self) -> None:
        self.num_cached = 0

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream):
        assert not gc.isenabled()  # what is collected may free a graph
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False
        self.num_graphs += 1

    def replay(self) -> None:
        self.num_replays += 1

    def synchronize(self, device=None) -> None:
        self.check("synchronize")

    def check(self, what: str) -> None:
        if self.is_capturing:
            raise RuntimeError(f"{what} is not permitted when stream is capturing")

    def part_of(self, tensor, index):
        """What an index takes of a tensor."""
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
                if not isinstance(it, torch.Tensor) or it.device != tensor.device:
                    self.check("an index from the host")
                places[dim] = torch.as_tensor(it)
            dim += end if it is Ellipsis else 1
        if not places:
            return tensor
        return torch.ops.aten.index(tensor, [places.get(n) for n in range(max(places) + 1)])

    def tolist(self, tensor: torch.Tensor):
        """Ones, as many as there are."""
        self.check("tolist")
        made = 1
        for size in reversed(tensor.shape):
            made = [made] * size
        return made


def flash_kernel(q_BTHD, k_BSKD, v_BSKD, *, cache_seqlens, causal):
    """flash_attn's kernel, which computes nothing."""
    tensors = (q_BTHD, k_BSKD, v_BSKD, cache_seqlens)
    assert all(it.device == DEVICE for it in tensors)
    assert all(it.dtype == q_BTHD.dtype != torch.float32 for it in tensors[:3])
    assert cache_seqlens.dtype == torch.int32
    assert k_BSKD.stride(3) == v_BSKD.stride(3) == 1
    assert causal
    return torch.empty_like(q_BTHD)


class Launch:
    """A kernel of Triton that computes nothing: how it is launched is checked."""

    def __getitem__(self, grid):
        assert all(0 < size <= limit for size, limit in zip(grid, GRID_LIMITS, strict=False))

        def launch(*args, **options) -> None:
            tensors = [it for it in args if isinstance(it, torch.Tensor)]
            assert tensors
            assert all(it.device == DEVICE for it in tensors)

        return launch


def trust_kernels(monkeypatch) -> None:
    """Every kernel works: those of Triton are a `Launch`, compiled functions run as they are."""
    from triton.runtime.jit import KernelInterface

    for module in pkgutil.walk_packages(gpu.__path__, "minitri.devices.gpu."):
        found = importlib.import_module(module.name)
        for name, value in list(vars(found).items()):
            if isinstance(value, KernelInterface):
                monkeypatch.setattr(found, name, Launch())
            elif value is kernels.problem_with and found is not kernels:
                monkeypatch.setattr(found, name, lambda check: "")
    monkeypatch.setattr(fused_modules, "compiled", lambda function: function)


@contextlib.contextmanager
def fake_cuda(monkeypatch, total_gib: float = 141.0):
    """Makes all tensors fakes, and `DEVICE` a device where they can be."""
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
        **{
            name: getattr(cuda, name)
            for name in ("empty_cache", "mem_get_info", "graph", "synchronize")
        },
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(FakeTensor, "tolist", lambda tensor: cuda.tolist(tensor))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("torch.nn.attention.bias.causal_lower_right", lambda *sizes: None)
    monkeypatch.setattr(host_memory, "host_memory", cuda.host_memory)
    flash = ModuleType("flash_attn")
    flash.flash_attn_with_kvcache = flash_kernel
    flash.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    with FakeTensorMode(), ByShape(cuda):
        yield cuda
