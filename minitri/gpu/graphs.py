"""CUDA graphs: a computation of fixed shapes is captured once and replayed, so that no kernel costs
a launch, an allocation or Python.

`GraphedStep` wraps a function from a dataclass of tensors to a tensor, for inputs of one shape. It
copies inputs into static buffers, over which the graph runs. **What it returns is overwritten by
the next call** of any step in the same pool: use it at once, or clone it. What else the function
reads or writes, weights and caches, must stay where it was at capture. On a CPU the static buffers
run eagerly, so that tests cover all but the graph itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from minitri.errors import InputError, shorten

NUM_WARMUPS = 2
"""Runs before a capture, in which libraries choose kernels and allocate their workspaces."""

Inputs = TypeVar("Inputs")
"""A dataclass whose fields are all tensors."""


class GraphedStep(Generic[Inputs]):
    """One function, captured for inputs of one shape."""

    def __init__(
        self,
        step: Callable[[Inputs], Tensor],
        example: Inputs,
        *,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Runs `step` on a copy of `example` to warm up, and captures it on `stream`.

        Steps that share a `pool` (of `torch.cuda.graph_pool_handle`) share memory, and must not run
        at the same time.
        """
        names = [field.name for field in dataclasses.fields(example)]  # type: ignore[arg-type]
        copies = {name: getattr(example, name).clone() for name in names}
        self._static: Inputs = dataclasses.replace(example, **copies)  # type: ignore[type-var]
        self._step = step
        self.capture_seconds = 0.0
        self.num_bytes = 0  # device memory that the capture took
        self._graph: torch.cuda.CUDAGraph | None = None
        device = next(iter(copies.values())).device
        if device.type == "cuda":
            assert stream is not None
            self._output = self._capture(device, pool, stream)
        else:
            self._output = step(self._static).clone()

    def __call__(self, inputs: Inputs) -> Tensor:
        """What the step returns for these inputs; valid until the next call."""
        copy_into(self._static, inputs)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._output.copy_(self._step(self._static))
        return self._output

    def _capture(self, device: torch.device, pool: Any, stream: torch.cuda.Stream) -> Tensor:
        clear_workspaces()
        torch.cuda.empty_cache()  # as the capture does, so that only its own memory is counted
        started, reserved = time.perf_counter(), torch.cuda.memory_reserved(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUPS):
                self._step(self._static)
        current.wait_stream(stream)
        clear_workspaces()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            output = self._step(self._static)
        clear_workspaces()
        self.capture_seconds = time.perf_counter() - started
        self.num_bytes = torch.cuda.memory_reserved(device) - reserved
        return output


def copy_into(static: Any, fresh: Any) -> None:
    """Copies the tensors of a dataclass into those of another. Raises `ValueError` if they differ
    in shape, dtype or device."""
    for field in dataclasses.fields(static):
        ours, theirs = getattr(static, field.name), getattr(fresh, field.name)
        for what in ("shape", "dtype", "device"):
            if getattr(ours, what) != getattr(theirs, what):
                raise ValueError(
                    f"{field.name} has {what} {getattr(theirs, what)}, but the step was captured "
                    f"with {getattr(ours, what)}; capture another one for it"
                )
        ours.copy_(theirs, non_blocking=True)


def clear_workspaces() -> None:
    """Frees cuBLAS's workspaces, of which it keeps one per stream for good.

    That of a capture must lie in the graph's memory, and none may stay behind for its stream.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


class GraphPool:
    """Captures steps on one stream into one pool of memory, and counts what that cost."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = self.num_bytes = 0
        self.capture_seconds = 0.0
        on_gpu = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def capture(self, step: Callable[[Inputs], Tensor], example: Inputs) -> GraphedStep[Inputs]:
        """A step captured for inputs like `example`. Raises `InputError` if it cannot be."""
        try:
            graphed = GraphedStep(step, example, pool=self._pool, stream=self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InputError(
                f"a CUDA graph could not be captured ({shorten(error, 90)}); use --no-cuda-graphs"
            ) from None
        self.num_graphs += 1
        self.capture_seconds += graphed.capture_seconds
        self.num_bytes += graphed.num_bytes
        return graphed


def graph_pool(device: torch.device, *, wanted: bool) -> GraphPool | None:
    """A pool for the graphs of a run, on a GPU where they are wanted; else None: run eagerly."""
    return GraphPool(device) if wanted and device.type == "cuda" else None
