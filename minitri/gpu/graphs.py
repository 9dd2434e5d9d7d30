"""CUDA graphs: a computation of fixed shapes is captured once and replayed, so that no kernel costs
a launch, an allocation or Python.

A captured step is a function from a block to a tensor, for blocks of one shape. It copies them into
static buffers, over which the graph runs. **What it returns is overwritten by the next call** of
any step in the same pool: use it at once, or clone it. What else the function reads or writes,
weights and caches, must stay where it was at capture. On a CPU the static buffers run eagerly, so
that tests cover all but the graph itself.

`CapturedSteps` are the way from a block of tokens to distributions, captured per block size with
the filters that a run uses. Their numbers (temperature, top-p, min-p) are a tensor, so other
numbers need no new capture; their form (`SamplingParams.form`) is fixed.
"""

import gc
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minitri.decoding.sampling import filtered_probs, greedy_probs, pad_vocabulary
from minitri.errors import InputError, shorten
from minitri.model.block import make_block
from minitri.model.cache import Cache
from minitri.model.llama import Block, Llama
from minitri.settings import LONGEST_BLOCK, SamplingParams

NUM_WARMUPS = 2
"""Runs before a capture, in which libraries choose kernels and allocate their workspaces."""

Step = Callable[[Block], Tensor]


class GraphPool:
    """Captures steps on one stream, and counts them.

    Its steps share memory, so they must not run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_graphs = 0
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self._memory: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, step: Step, example: Block) -> Step:
        """The step, captured over a copy of `example`. Raises `InputError` if it cannot be."""
        static = replace(example, **{name: it.clone() for name, it in vars(example).items()})
        try:
            replay, output = self._record(lambda: step(static))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InputError(
                f"a CUDA graph could not be captured ({shorten(error, 90)}); use --no-cuda-graphs"
            ) from error
        self.num_graphs += 1

        def captured(block: Block) -> Tensor:
            for name, ours in vars(static).items():
                theirs = getattr(block, name)
                assert ours.shape == theirs.shape, name  # else it would be broadcast
                ours.copy_(theirs, non_blocking=True)
            replay()
            return output

        return captured

    def _record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Warms `run` up and captures it: what replays it, and the tensor that this writes."""
        if not self.on_gpu:
            first = run().clone()
            return lambda: first.copy_(run()), first
        current = torch.cuda.current_stream(self._stream.device)
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
    """Frees cuBLAS's workspaces, of which it keeps one per stream for good.

    That of a capture must lie in the graph's memory, and none may be left for its stream.
    """
    torch._C._cuda_clearCublasWorkspaces()


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
        self.by_size: dict[int, Step] = {}

        def step(block: Block) -> Tensor:
            hidden_BTE = model.forward(block, cache, None, queries_LBTHD)
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
