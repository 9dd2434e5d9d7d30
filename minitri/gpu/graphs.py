"""CUDA graphs: a computation of fixed shapes is captured once and replayed, so that no kernel costs
a launch, an allocation or Python.

`GraphedStep` wraps a function from a dataclass of tensors to a tensor, for inputs of one shape. It
copies inputs into static buffers, over which the graph runs. **What it returns is overwritten by
the next call** of any step in the same pool: use it at once, or clone it. What else the function
reads or writes, weights and caches, must stay where it was at capture. On a CPU the static buffers
run eagerly, so that tests cover all but the graph itself.

`CapturedSteps` are the way from a block of tokens to distributions, captured per block size with
the filters that a run uses. Their numbers (temperature, top-p, min-p) are a tensor, so other
numbers need no new capture; their form (`SamplingParams.form`) is fixed.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from minitri.decoding.sampling import filtered_probs, greedy_probs, pad_vocabulary
from minitri.errors import InputError, shorten
from minitri.model.block import Block, forward_block, make_block
from minitri.model.cache import Cache
from minitri.model.llama import Llama
from minitri.settings import LONGEST_BLOCK, SamplingParams

NUM_WARMUPS = 2
"""Runs before a capture, in which libraries choose kernels and allocate their workspaces."""

Inputs = TypeVar("Inputs")
"""A dataclass whose fields are all tensors."""


class GraphPool:
    """Captures steps on one stream, and counts what that cost.

    Its steps share memory, so they must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = self.num_bytes = 0  # bytes of device memory that captures took
        self.capture_seconds = 0.0
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[Inputs], Tensor], example: Inputs) -> "GraphedStep[Inputs]":
        """A step captured for inputs like `example`. Raises `InputError` if it cannot be."""
        try:
            graphed = GraphedStep(step, example, self)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InputError(
                f"a CUDA graph could not be captured ({shorten(error, 90)}); use --no-cuda-graphs"
            ) from None
        self.num_graphs += 1
        return graphed

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Warms `run` up and captures it: what replays it, and the tensor that this writes."""
        device = self._stream.device
        clear_workspaces()
        torch.cuda.empty_cache()  # as the capture does, so that only its own memory is counted
        started = time.perf_counter()
        reserved = torch.cuda.memory_reserved(device)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARMUPS):
                run()
        current.wait_stream(self._stream)
        clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            output = run()
        clear_workspaces()
        self.capture_seconds += time.perf_counter() - started
        self.num_bytes += torch.cuda.memory_reserved(device) - reserved
        return graph.replay, output


class GraphedStep(Generic[Inputs]):
    """One function, captured for inputs of one shape."""

    def __init__(
        self, step: Callable[[Inputs], Tensor], example: Inputs, pool: GraphPool | None = None
    ) -> None:
        """Captures `step` over a copy of `example` in a pool on a GPU; else it runs eagerly."""
        copies = {name: tensor.clone() for name, tensor in vars(example).items()}
        static: Inputs = dataclasses.replace(example, **copies)  # type: ignore[type-var]
        self._static = static
        self._run: Callable[[], object]
        if pool is not None and pool.on_gpu:
            self._run, self._output = pool.record(lambda: step(static))
        else:
            output = step(static).clone()
            self._run = lambda: output.copy_(step(static))
            self._output = output

    def __call__(self, inputs: Inputs) -> Tensor:
        """What the step returns for these inputs; valid until the next call.

        Raises `ValueError` if they differ in shape, dtype or device from those at capture.
        """
        for name, ours in vars(self._static).items():
            theirs = getattr(inputs, name)
            for what in ("shape", "dtype", "device"):
                if getattr(ours, what) != getattr(theirs, what):
                    raise ValueError(
                        f"{name} has {what} {getattr(theirs, what)}, but the step was captured "
                        f"with {getattr(ours, what)}; capture another one for it"
                    )
            ours.copy_(theirs, non_blocking=True)
        self._run()
        return self._output


def clear_workspaces() -> None:
    """Frees cuBLAS's workspaces, of which it keeps one per stream for good.

    That of a capture must lie in the graph's memory, and none may be left for its stream.
    """
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def graph_pool(device: torch.device, *, wanted: bool) -> GraphPool | None:
    """A pool for the graphs of a run, on a GPU where they are wanted; else None: run eagerly."""
    return GraphPool(device) if wanted and device.type == "cuda" else None


class CapturedSteps:
    """Steps of one model over one cache, for several block sizes."""

    @torch.no_grad()
    def __init__(
        self,
        model: Llama,
        cache: Cache,
        filters: SamplingParams,
        graphs: GraphPool,
        block_sizes: Collection[int],
        *,
        vocab_size: int,
        queries_LBTHD: Tensor | None,
    ) -> None:
        """Captures now, so that it costs no decoding time.

        What a capture writes into the cache stands after the prefixes. Blocks of more than
        `LONGEST_BLOCK` tokens go by lengths on the host, which a graph would freeze.
        """
        numbers_3 = torch.tensor(filters.numbers, dtype=torch.float64).to(model.device)
        self._form = filters.form
        self._numbers_3 = numbers_3
        self.by_size: dict[int, GraphedStep[Block]] = {}

        def step(block: Block) -> Tensor:
            hidden_BTE = forward_block(model, block, cache, queries_LBTHD)
            logits_BTV = model.logits(hidden_BTE)[..., :vocab_size]
            probs_QV = probs_by_tensor(logits_BTV.flatten(0, 1), filters, numbers_3)
            return pad_vocabulary(probs_QV.unflatten(0, logits_BTV.shape[:2]), vocab_size)

        for size in sorted(size for size in block_sizes if size <= LONGEST_BLOCK):
            example = make_block(model, [[0] * size for _ in cache.lengths], cache, size)
            self.by_size[size] = graphs.capture(step, example)

    def size_for(self, T: int) -> int | None:
        """The smallest captured size that holds blocks of T tokens; None if there is none."""
        return min((size for size in self.by_size if size >= T), default=None)

    def can_sample_by(self, sampling: SamplingParams) -> bool:
        """Whether the steps can apply these filters, too."""
        return sampling.temperature == 0 or sampling.form == self._form

    def sample_by(self, sampling: SamplingParams) -> None:
        """Changes the numbers of the filters."""
        self._numbers_3.copy_(torch.tensor(sampling.numbers, dtype=torch.float64))


def probs_by_tensor(logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor) -> Tensor:
    """`probs_from_logits` by numbers on the device (`SamplingParams.numbers`).

    Of `filters` only `filters.form` counts. Nothing is asked of the host, so a captured step
    follows other numbers when the tensor is given others.
    """
    probs_NV = filtered_probs(logits_NV, filters, *numbers_3, sort_all=True)
    return torch.where(numbers_3[0] == 0, greedy_probs(logits_NV), probs_NV)
