"""What a step of decoding asks of a GPU outside its captured graphs, counted on a CPU.

    python -m tools.bench.launches [--method triforce] [--gamma1 2] [--gamma2 6]

Tiny models run through the code of a GPU; what a graph holds runs eagerly, and is not counted. By
phase and step: launches of kernels and copies, replays of graphs, small tensors that come from the
host with their bytes, and how often the host waits for an answer. A tensor is the host's until it
meets one of the device. The time is reckoned from these counts.
"""

import argparse
import sys
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitri.core.config import ModelConfig
from minitri.core.decoding import noise
from minitri.core.graphs import GraphPool
from minitri.core.memory import Models
from minitri.core.model import block
from minitri.core.model.llama import Llama
from minitri.core.requests import Request
from minitri.core.settings import LONGEST_BLOCK, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.devices.gpu.attention_backends import GpuAttention, attend_masked
from tools.runs import begin

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
}
HEADS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
CONFIG = ModelConfig(**SIZES, **HEADS, context_length=4096)
LAUNCH_MS, WAIT_MS = 8e-3, 2e-2
"""Of a launch, PyTorch's own work included, and of a wait: common figures, not measured here."""
NUM_STEPS = 16
NEW = {"detach_", "lift_fresh"}
"""What `torch.tensor` ends with."""
PHASES = {"_draft": "draft", "prepare": "catch up", "commit": "commit"}
COLUMNS = ("launches", "replays", "from host", "bytes", "waits")


class Counting(TorchDispatchMode):
    """Counts operations that are not part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.in_graph = False
        self._of_host: dict[int, Tensor] = {}  # keeps them, so that addresses stay theirs

    def note(self, column: str, amount: int = 1) -> None:
        """Adds to the phase that runs now."""
        self.counts[phase(), column] += amount

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if self.in_graph:
            return output
        name = function.overloadpacket.__name__
        inputs = tensors_of((args, kwargs))
        if name in NEW:
            self._of_host |= {address(it): it for it in inputs}
        made = [it for it in tensors_of(output) if address(it) not in map(address, inputs)]
        if all(address(it) in self._of_host for it in inputs):
            self._of_host |= {address(it): it for it in made}  # or it is made of nothing
            return output
        for it in inputs:
            if self._of_host.pop(address(it), None) is not None:
                self.note("from host")
                self.note("bytes", it.nbytes)
        if made or name.endswith("_"):  # else a view
            self.note("launches")
        return output


def tensors_of(tree: Any) -> list[Tensor]:
    """Of arguments or results."""
    return [it for it in tree_leaves(tree) if isinstance(it, Tensor)]


def address(tensor: Tensor) -> int:
    """Where a tensor's storage lies."""
    return tensor.untyped_storage().data_ptr()


def phase() -> str:
    """What the cascade is doing, by the functions that are running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        if name in PHASES:
            return PHASES[name]
        if name == "verify" and hasattr(frame.f_locals.get("self"), "stats"):
            return str(frame.f_locals["self"].stats.name)
    return "other"


def count(speculation: SpeculationConfig, sampling: SamplingParams) -> tuple[Counter[Any], str]:
    """Counts of `NUM_STEPS` steps, and the rounds that they took."""
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    target, draft = (Llama(CONFIG, attend=GpuAttention(attend_masked), **how) for _ in range(2))
    for ours, theirs in zip(target.parameters(), draft.parameters(), strict=True):
        ours.copy_(0.3 * torch.randn(ours.shape, generator=generator))
        theirs.copy_(ours + 0.02 * torch.randn(ours.shape, generator=generator))
    counting, record, tolist = Counting(), GraphPool.record, Tensor.tolist

    def recorded(pool: GraphPool, run: Any) -> Any:
        replay, output = record(pool, run)

        def replayed() -> None:
            counting.note("replays")
            counting.in_graph = True  # on a CPU outputs are copied, too
            replay()
            counting.in_graph = False

        return replayed, output

    def waited(tensor: Tensor) -> Any:
        counting.note("waits", int(address(tensor) not in counting._of_host))
        return tolist(tensor)

    prompt = torch.randint(CONFIG.vocab_size, (600,), generator=generator).tolist()
    request = Request(prompt, 0, sampling, GenerationConfig(2000))
    with (
        torch.inference_mode(),
        mock.patch.object(GraphPool, "record", recorded),
        mock.patch.object(block, "reads_slots", lambda _device, size: size <= LONGEST_BLOCK),
        mock.patch.object(noise, "gumbel_scores", noise.dense_scores),
    ):
        models = Models(target, target, draft)
        session = begin(models, [request], speculation, graphs=GraphPool(CPU))
        list(session.prefill(0))
        session.start([*range(len(session.sequences))])
        for _ in range(NUM_STEPS):  # so that all is captured
            session.step()
        counting.counts.clear()
        before = Counter({stage.name: stage.num_rounds for stage in session.stats.stages})
        with counting, mock.patch.object(Tensor, "tolist", waited):
            for _ in range(NUM_STEPS):
                session.step()
    stages = session.stats.stages
    rounds = [f"{it.name} {(it.num_rounds - before[it.name]) / NUM_STEPS:g}" for it in stages]
    return counting.counts, ", ".join(rounds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.launches", description=__doc__)
    parser.add_argument("--method", default="triforce")
    parser.add_argument("--gamma1", type=int, default=2)
    parser.add_argument("--gamma2", type=int, default=6)
    speculation = SpeculationConfig(**vars(parser.parse_args()), budget=256, num_recent_tokens=60)
    counts, rounds = count(speculation, SamplingParams(0.6, top_p=0.9))
    rows = {
        name: [counts[name, column] / NUM_STEPS for column in COLUMNS]
        for name in sorted({name for name, _ in counts})
    }
    rows["all"] = [sum(it, 0.0) for it in zip(*rows.values(), strict=True)]
    launches, replays, *_, waits = rows["all"]
    print(f"{speculation.method}, rounds a step: {rounds}")
    print(f"{'a step':12s}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, row in rows.items():
        print(f"{name:12s}" + "".join(f"{it:12.1f}" for it in row))
    ms = (launches + replays) * LAUNCH_MS + waits * WAIT_MS
    print(f"about {ms:.2f} ms a step ({LAUNCH_MS} ms a launch or replay, {WAIT_MS} a wait)")


if __name__ == "__main__":
    main()
