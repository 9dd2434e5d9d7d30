"""CUDA graphs: a computation of fixed shapes is captured once and replayed as one launch.

`GraphPool.run` captures a function of tensors when a run starts; later it copies inputs into static
buffers and replays the graph. All functions share these, and buffers of outputs: **an output is
overwritten by the next run**. Weights and caches must keep their addresses.
"""

import functools
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from minitri.core.errors import InputError, shorten

ONE_AT_A_TIME = threading.Lock()  # captures, as their beginning waits for the whole device
NUM_WARMUPS = 2  # before a capture: libraries choose kernels and allocate their workspaces

Function = Callable[..., Any]  # from tensors to a tensor, or a tuple of tensors


class GraphPool:
    """A set of captured CUDA graphs, which share memory and never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.rules = set[Any]()  # verification rules whose graphs have all been captured
        self.is_capturing = True  # whether new shapes are captured; else they run eagerly
        self._device = device
        self._captured: dict[Any, Function] = {}
        self._buffers: dict[Any, Tensor] = {}  # of inputs and outputs, by their place and dtype
        if device.type == "cuda":
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def run(self, function: Function, *inputs: Any, **constants: Any) -> Any:
        """Returns `function(*inputs, **constants)`, by a CUDA graph for these shapes and constants.
        Without one captures it if `is_capturing` (may raise `InputError`), else runs eagerly."""
        key = function, *constants.values(), tree_map(lambda it: (it.shape, it.dtype), inputs)
        function = functools.partial(function, **constants)
        if self.is_capturing and key not in self._captured:
            self._captured[key] = self.capture(function, *inputs)
        if key in self._captured:
            return self._captured[key](*inputs)
        return function(*tree_map(lambda it: it.to(self._device, non_blocking=True), inputs))

    def capture(self, function: Function, *examples: Any) -> Function:
        """Captures `function(*examples)`; returns a function that replays it on other tensors.
        Capture the largest first: smaller ones then share its memory. Raises `InputError`."""
        statics = self._shared("input", examples)
        try:
            replay, output = self.record(lambda: self._shared("output", function(*statics)))
        except RuntimeError as error:  # also raised when memory runs out
            raise InputError(
                f"a CUDA graph could not be captured ({shorten(error, 90)})",
                "use cuda_graphs=False",
            ) from error

        def captured(*inputs: Any) -> Any:
            tree_map(lambda ours, theirs: ours.copy_(theirs, non_blocking=True), statics, inputs)
            replay()
            return output

        return captured

    def _shared(self, use: str, tensors: Any) -> Any:
        """Copies of nested tensors, in buffers that all functions share; `use`: input or output."""
        places = itertools.count()

        def copy(tensor: Tensor) -> Tensor:
            key = use, next(places), tensor.dtype
            size = tensor.numel()
            if key not in self._buffers or len(self._buffers[key]) < size:
                self._buffers[key] = tensor.new_empty(size, device=self._device)
            return self._buffers[key][:size].view_as(tensor).copy_(tensor, non_blocking=True)

        return tree_map(copy, tensors)

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Warms `run` up, captures its CUDA graph; returns its replay function, and its output."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUPS):
                run()
        current.wait_stream(self._stream)
        clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        # The garbage collector may free graphs, events or page-locked memory: a capture forbids it.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # Other threads may launch kernels meanwhile, but draw nothing from CUDA's generator.
            mode = "thread_local"
            capture = torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode=mode)
            with ONE_AT_A_TIME, capture:
                output = run()
        finally:
            if was_enabled:
                gc.enable()
        clear_workspaces()
        return graph.replay, output


def clear_workspaces() -> None:
    """Frees cuBLAS's workspaces, as a capture must allocate new ones in the memory of its graph."""
    torch._C._cuda_clearCublasWorkspaces()
