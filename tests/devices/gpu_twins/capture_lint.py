"""What a CUDA graph cannot hold is refused in its CPU twin, where steps run eagerly.

A captured step may not ask a tensor for its numbers, nor make tensors of a size that depends on
them or on the host, nor draw random numbers of its own; what it reads next to its inputs must stay
where it is. All steps of a pool share memory: what one made may be overwritten when it is over.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.devices.gpu_twins.conftest import CpuPool

WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
SIZED_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount"}
HOST_DATA = {"lift_fresh", "lift_fresh_copy"}  # by `torch.tensor` and the like
ASKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.cpu}
"""What asks for all numbers of a tensor, on a CPU without an operation that is dispatched."""
MAKERS = {torch.arange, torch.empty, torch.eye, torch.full, torch.ones, torch.zeros}
"""What makes tensors of the host unless it is told a device."""


class CaptureError(Exception): ...


class NoHost(TorchFunctionMode):
    """Refuses functions that wait for the device, or make tensors elsewhere."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in ASKS:
            raise CaptureError(f"{function.__name__}: the host waits for a number")
        if function in MAKERS and kwargs.get("device") is None:
            raise CaptureError(f"{function.__name__}: numbers from the host")
        return function(*args, **kwargs)


class Watch(TorchDispatchMode):
    """One run of a step: refuses operations, and notes the addresses that come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: set[int] = set()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in WAITS:
            raise CaptureError(f"{name}: the host waits for a number")
        is_repeated = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in SIZED_BY_DATA or is_masked(name, args) or is_repeated:
            raise CaptureError(f"{name}: a size that depends on data")
        if name in HOST_DATA:
            raise CaptureError(f"{name}: numbers from the host")
        is_attention = name == "scaled_dot_product_attention" and not kwargs.get("dropout_p")
        if torch.Tag.nondeterministic_seeded in function.tags and not is_attention:
            raise CaptureError(f"{name}: random numbers that are no input")
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and address(tensor) not in self.storages:
                self.outside.add(address(tensor))
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and address(tensor) not in self.outside:
                self.storages[address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    def check_nothing_stays(self, output):
        """Next to its output a step may leave no tensor that it made."""
        for place, storage in self.storages.items():
            if place not in map(address, tree_leaves(output)) and not storage.expired():
                raise CaptureError("a tensor made in a step stays when it is over")


def is_masked(name: str, args) -> bool:
    """Whether an operation reads or writes where a mask is true."""
    masks = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(index is not None and index.dtype == torch.bool for index in masks)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class LintedPool(CpuPool):
    """A pool whose steps are watched whenever they run."""

    num_runs = 0

    def run(self, function, *inputs, **constants):
        """What a run returns is overwritten by the next one, whatever that returns."""
        before = self.num_runs
        output = tree_map(Tensor.clone, super().run(function, *inputs, **constants))
        assert self.num_runs > before, "inputs of shapes that were not captured"
        self._outputs = tree_leaves(output)
        return output

    def record(self, run):
        run()  # a warm-up, which makes buffers
        known: list[set[int]] = []

        def watched():
            self.num_runs += 1
            with Watch() as watch, NoHost():
                output = run()
            known.append(watch.outside)
            if watch.outside != known[0]:
                raise CaptureError("a tensor from outside has moved since the capture")
            if len(known) > 1:  # what the capture has left comes from outside later
                watch.check_nothing_stays(output)
            return output

        return super().record(watched)
