"""CUDA graphs: a computation of fixed shapes is captured once and replayed, without launches,
allocations and Python.

What is captured is a function of tensors alone: a pass from tokens to distributions, a round of a
draft model, a verdict. While a run starts, `GraphPool.run` captures it for inputs of these shapes;
later it copies others into static buffers, over which the graph runs. **What it returns is
overwritten by the next run** of any function. Weights and caches must stay where they were. On a
CPU the static buffers run eagerly, so that tests cover all but the graph itself.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from minitri.core.errors import InputError, shorten
from minitri.core.model.llama import Llama
from minitri.core.settings import GenerationConfig, SamplingParams

NUM_WARMUPS = 2
"""Runs before a capture, in which libraries choose kernels and allocate their workspaces."""

Function = Callable[..., Any]  # from tensors to a tensor, or a tuple of tensors


class GraphPool:
    """Captures functions on one stream; its graphs share memory, and never run at once."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.is_open = True
        """Whether new shapes are captured; else they run eagerly, as a capture takes long."""
        self._device = device
        self._captured: dict[Any, Function] = {}
        if device.type == "cuda":
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def run(self, function: Function, *inputs: Any) -> Any:
        """What the function gives for these tensors, or tuples of them, on the host or not. Raises
        `InputError`."""
        key = function, *((it.shape, it.dtype) for it in tree_leaves(inputs))
        if self.is_open and key not in self._captured:
            self._captured[key] = self.capture(function, *inputs)
        if key in self._captured:
            return self._captured[key](*inputs)
        return function(*tree_map(lambda it: it.to(self._device, non_blocking=True), inputs))

    def capture(self, function: Function, *examples: Any) -> Function:
        """The function, captured over copies of the examples. Raises `InputError`."""
        copied = functools.partial(Tensor.to, device=self._device, non_blocking=True, copy=True)
        statics = tree_map(copied, examples)
        buffers = tree_leaves(statics)
        try:
            replay, output = self.record(lambda: function(*statics))
        except RuntimeError as error:  # no memory is one, too
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
        """Warms `run` up and captures it: what replays it, and the tensors that this writes."""
        if self._device.type == "cpu":
            first = run()

            def again() -> None:
                for ours, theirs in zip(tree_leaves(first), tree_leaves(run()), strict=True):
                    ours.copy_(theirs)

            return again, first
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUPS):
                run()
        current.wait_stream(self._stream)
        clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        # To free a graph, an event or page-locked memory, as collected garbage may, would end it.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
                output = run()
        finally:
            if was_enabled:
                gc.enable()
        clear_workspaces()
        return graph.replay, output


def clear_workspaces() -> None:
    """Frees cuBLAS's workspaces: that of a capture must lie in the graph's memory."""
    torch._C._cuda_clearCublasWorkspaces()


def graph_pool(device: torch.device, *, wanted: bool) -> GraphPool | None:
    """A pool for the graphs of a run, on a GPU where they are wanted; else None: run eagerly."""
    return GraphPool(device) if wanted and device.type == "cuda" else None


def filters_of(wanted: list[SamplingParams], model: Llama, run: GenerationConfig) -> SamplingParams:
    """The filters to capture. Raises `InputError` if one graph cannot apply all these."""
    first, *others = {it.form: it for it in wanted if it.temperature > 0}.values() or wanted[:1]
    if others and model.device.type == "cuda" and run.cuda_graphs:
        raise InputError(
            f"captured graphs have filters of one kind, got {first} and {others[0]}",
            "give every request the same kinds",
            "switch them off with cuda_graphs=False",
        )
    return first
