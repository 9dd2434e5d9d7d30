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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from minitri.core.decoding.random_source import sample_by_number
from minitri.core.decoding.sampling import pad_vocabulary, probs_by_tensor
from minitri.core.errors import InputError, shorten
from minitri.core.model.block import take_rows, unpack_block
from minitri.core.model.cache import Cache
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


@dataclass(eq=False)
class Passes:
    """Passes of a model over a cache as functions of tensors alone, which a graph can hold. Of
    `filters` the form counts; the numbers (temperature, top-p, min-p) are read from `numbers_3`."""

    model: Llama
    cache: Cache
    filters: SamplingParams
    vocab_size: int
    """That of the distributions: the target's, whatever the model's."""
    queries_LBTHD: Tensor | None
    """Takes the rotated queries of every block."""

    def __post_init__(self) -> None:
        self.numbers_3 = torch.tensor(self.filters.numbers, dtype=torch.float64)
        self.numbers_3 = self.numbers_3.to(self.model.device)

    def read(self, packed_4BT: Tensor, guesses_BN: Tensor, rule_TT: Tensor | None = None) -> Tensor:
        """Final hidden states (B, N + 1, E) after each row's last certain token and after each of
        its guesses, which follow it; `rule_TT` as for `Llama.forward`."""
        places_BN = packed_4BT[3, :, : guesses_BN.shape[1] + 1]
        block = unpack_block(packed_4BT)
        if len(guesses_BN[0]):
            block = block.with_guesses(places_BN[:, 1:], guesses_BN)
        hidden_BTE = self.model.forward(block, self.cache, rule_TT, self.queries_LBTHD)
        return take_rows(hidden_BTE, places_BN.clamp(max=packed_4BT.shape[2] - 1))

    def read_one(self, packed_4B1: Tensor, tokens_B: Tensor) -> Tensor:
        """Hidden states (B, 1, E) after a block of one token, which is this one."""
        # A drafter may lack the last tokens of the target's vocabulary.
        tokens_B1 = tokens_B.clamp(max=self.model.config.vocab_size - 1).unsqueeze(1)
        block = replace(unpack_block(packed_4B1), tokens_BT=tokens_B1)
        return self.model.forward(block, self.cache, None, self.queries_LBTHD)

    def logits(self, hidden_BNE: Tensor) -> Tensor:
        """Logits (B, N, V) of the tokens that both the model and the target have."""
        return self.model.logits(hidden_BNE)[..., : self.vocab_size]

    def probs(self, packed_4BT: Tensor, guesses_BN: Tensor, *rule_TT: Tensor) -> Tensor:
        """Distributions and logits (2, B, N + 1, V) after what `read` reads."""
        return self._probs(self.read(packed_4BT, guesses_BN, *rule_TT))

    def probs_after(self, packed_4B1: Tensor, tokens_B: Tensor) -> Tensor:
        """Both, (2, B, 1, V), after what `read_one` reads."""
        return self._probs(self.read_one(packed_4B1, tokens_B))

    def round(self, packed_4BT: Tensor, numbers_BN: Tensor) -> tuple[Tensor, Tensor]:
        """N guesses of a draft model after the last certain tokens, one after the other, and the
        distributions (B, N, V) that they were sampled from: see `sample_by_number`."""
        last_4B1 = packed_4BT.gather(2, packed_4BT[3:, :, :1].expand(4, -1, -1))
        hidden_B1E = self.read(packed_4BT, packed_4BT[0, :, :0])
        tokens, probs = list[Tensor](), list[Tensor]()
        for i, numbers_B in enumerate(numbers_BN.unbind(1)):
            if i > 0:
                hidden_B1E = self.read_one(last_4B1 + i, tokens[-1])  # which replace its tokens
            probs.append(self._probs(hidden_B1E)[0, :, 0])
            tokens.append(sample_by_number(probs[-1], numbers_B))
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def _probs(self, hidden_BNE: Tensor) -> Tensor:
        logits_BNV = self.logits(hidden_BNE)
        probs_QV = probs_by_tensor(logits_BNV.flatten(0, 1), self.filters, self.numbers_3)
        both_2BNV = torch.stack((probs_QV.reshape(logits_BNV.shape), logits_BNV))
        return pad_vocabulary(both_2BNV, self.vocab_size)


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
