"""CUDA graphs: a computation of fixed shapes is captured once and replayed as one launch.

`GraphPool.run` captures a function of tensors when a run starts; later it copies inputs into static
buffers and replays the graph. **Its output is overwritten by the next run** of any function;
weights and caches must keep their addresses.
"""

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from minitri.core.errors import InputError, shorten

ONE_AT_A_TIME = threading.Lock()  # captures, as their beginning waits for the whole device
NUM_WARMUPS = 2  # before a capture: libraries choose kernels and allocate their workspaces

Function = Callable[..., Any]  # from tensors to a tensor, or a tuple of tensors


class GraphPool:
    """A set of captured CUDA graphs, which share one memory pool and never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.rules = set[Any]()  # verification rules whose graphs have all been captured
        self.is_capturing = True  # whether new shapes are captured; else they run eagerly
        self._device = device
        self._captured: dict[Any, Function] = {}
        if device.type == "cuda":
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def run(self, function: Function, *inputs: Any, **constants: Any) -> Any:
        """Calls a function by its CUDA graph for inputs of these shapes. If there is none, captures
        one if `is_capturing` (`InputError` if that fails), else calls the function as it is."""
        shapes = ((tensor.shape, tensor.dtype) for tensor in tree_leaves(inputs))
        key = function, *constants.values(), *shapes
        function = functools.partial(function, **constants)
        if self.is_capturing and key not in self._captured:
            self._captured[key] = self.capture(function, *inputs)
        if key in self._captured:
            return self._captured[key](*inputs)
        return function(*tree_map(lambda it: it.to(self._device, non_blocking=True), inputs))

    def capture(self, function: Function, *examples: Any) -> Function:
        """Captures the function over copies of example inputs. Raises `InputError`."""
        statics = tree_map(lambda it: it.to(self._device, non_blocking=True, copy=True), examples)
        buffers = tree_leaves(statics)
        try:
            replay, output = self.record(lambda: function(*statics))
        except RuntimeError as error:  # also raised when memory runs out
            raise InputError(
                f"a CUDA graph could not be captured ({shorten(error, 90)})",
                "use cuda_graphs=False",
            ) from error
        self.num_graphs += 1

        def captured(*inputs: Any) -> Any:
            for ours, theirs in zip(buffers, tree_leaves(inputs), strict=True):
                ours.copy_(theirs, non_blocking=True)
            replay()
            return output

        return captured

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Warms `run` up and captures it; returns a function that replays it, and its output."""
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
