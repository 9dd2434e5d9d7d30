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

WHOLE_DEVICE = threading.RLock()  # held by captures, and by waits for all streams, which end them
NUM_WARMUPS = 2  # before a capture: kernels are compiled, and libraries choose theirs

Function = Callable[..., Any]  # from tensors to a tensor, or a tuple of tensors


class GraphPool:
    """A set of captured CUDA graphs, which share memory and never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.rules = set[Any]()  # verification rules whose graphs have all been captured
        self.is_capturing = True  # whether new shapes are captured; else they run eagerly
        self._device = device
        self._captured = dict[Any, Any]()  # by function and shapes: inputs, replay, outputs
        self._buffers = dict[Any, Tensor]()  # of inputs and outputs, by their place and dtype
        if device.type == "cuda":
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def run(self, function: Function, *inputs: Any, **constants: Any) -> Any:
        """Returns `function(*inputs, **constants)`, by a CUDA graph for these shapes and constants.
        Without one captures it if `is_capturing` (may raise `RuntimeError`), else runs eagerly.
        Capture the largest first: smaller ones then share its memory."""
        key = function, *constants.values(), tree_map(lambda it: (it.shape, it.dtype), inputs)
        function = functools.partial(function, **constants)
        if self.is_capturing and key not in self._captured:
            statics = self._shared("input", inputs)
            recorded = self.record(lambda: self._shared("output", function(*statics)))
            self._captured[key] = statics, *recorded
        if key not in self._captured:
            return function(*tree_map(lambda it: it.to(self._device, non_blocking=True), inputs))
        statics, replay, output = self._captured[key]
        tree_map(lambda ours, theirs: ours.copy_(theirs, non_blocking=True), statics, inputs)
        replay()
        return output

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
        # Not on `_stream`: PyTorch lends 32 in turns, and another thread may capture on the same.
        for _ in range(NUM_WARMUPS):
            run()
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        with WHOLE_DEVICE:
            # The garbage collector may free graphs or page-locked memory: a capture forbids it.
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                self._stream.wait_stream(current)
                # A capture must allocate cuBLAS's workspaces anew, in the memory of its graph.
                torch._C._cuda_clearCublasWorkspaces()
                # Other threads may launch kernels meanwhile, but draw no random numbers of CUDA's.
                with torch.cuda.graph(
                    graph, self._memory, self._stream, capture_error_mode="thread_local"
                ):
                    output = run()
            finally:
                if was_enabled:
                    gc.enable()
                torch.cuda.set_stream(current)  # a capture that fails may leave its own
                torch._C._cuda_clearCublasWorkspaces()
                current.wait_stream(self._stream)
        return graph.replay, output
