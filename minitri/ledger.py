"""The ledger: what each phase of decoding reads, computes, launches and waits for, and the
milliseconds that follow, so that a measurement can contradict it line by line.

A table over `roofline.py`: bytes over bandwidth, and beside them what a GPU's host costs. Nothing
in it is measured by this program; every constant is stated here with where it comes from. Kernels
in a CUDA graph follow one another on the device; others are launched while the device works on the
ones before, so the slower of the two counts. `python -m minitri.plan --explain` prints it, and
`python -m minitri.bench --load dummy` prints it beside what was measured.

Legend: L layers, B batch, E hidden size, V vocab, T tokens of a pass.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from minitri.config import ModelConfig
from minitri.decoding.autotuner import expected_block, expected_tokens
from minitri.execution import Ranks
from minitri.parallel.split import share_of
from minitri.roofline import (
    Machine,
    eight_bit_bytes,
    kv_bytes_per_token,
    pass_seconds,
    weights_per_pass,
)
from minitri.settings import SpeculationConfig, StepPlan

LAUNCHES = {"plain": (18, 20), "fused": (20, 10)}
"""Of a pass, around the layers and in each: counted on the meta device, by `test_fused.py`."""
SAMPLE_LAUNCHES, VERDICT_LAUNCHES = 9, 69
"""Outside of graphs: to sample a drafted token, and to verify a block of them."""
COMMIT_LAUNCHES = 16
"""The most that a commit takes, by `test_launches_of_commits.py`."""
REBUILD_LAUNCHES = 31
"""Of a rebuilt layer."""
HOSTED_COPIES = 4
"""Per row, KV head and layer in host memory: K and V to the device, and what is new back."""
CARDS = {
    size: Machine(
        speed, speed, 25e9, flops_per_second=flops, seconds_per_launch=1.6e-6,
        seconds_per_eager_launch=5e-6, seconds_per_round_trip=60e-6, seconds_per_sum=12e-6,
    )
    for size, speed, flops in ((48, 1e12, 100e12), (80, 2e12, 200e12), (1e9, 4e12, 500e12))
}  # fmt: skip
"""By memory in GiB: what an A100, an H200 and smaller cards read, and the FLOP/s of large products
there. A launch in a graph is an empty kernel, a round trip a copy to the host, the Python behind it
and the next launch, a sum an all-reduce without NVLink. The link is PCIe 4.0 x16."""


@dataclass(frozen=True)
class Phase:
    """What one occurrence of a phase needs, on each GPU."""

    name: str
    per_step: float
    """Occurrences in a step of decoding."""
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    link_bytes: float = 0.0
    """Between host and device, in the busier direction."""
    sent_bytes: float = 0.0
    """To other GPUs, while nothing computes."""
    flops: float = 0.0
    launches: float = 0.0
    """Of kernels in a CUDA graph."""
    eager_launches: float = 0.0
    round_trips: int = 0
    """Times that the host waits for the device."""
    sums: int = 0
    """Of tensors of all GPUs."""
    model: ModelConfig | None = None

    @property
    def stage(self) -> str:
        """Draft, retrieval, target or commit."""
        return self.name.split()[0]

    def ms(self, machine: Machine) -> float:
        """Predicted milliseconds."""
        seconds = (self.weight_bytes + self.kv_bytes) / machine.kv_bytes_per_second
        if self.model is not None:
            options: dict[str, Any] = {"weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes}
            seconds = pass_seconds(machine, self.model, **options)
        seconds = max(seconds, self.flops / machine.flops_per_second)
        seconds += (self.launches + self.eager_launches) * machine.seconds_per_launch
        seconds += self.sums * machine.seconds_per_sum
        seconds += self.sent_bytes / machine.link_bytes_per_second
        on_host = self.eager_launches * machine.seconds_per_eager_launch
        seconds = max(seconds, on_host, self.link_bytes / machine.link_bytes_per_second)
        return 1e3 * (seconds + self.round_trips * machine.seconds_per_round_trip)


@dataclass(frozen=True)
class Workload:
    """What is decoded, and where it stands."""

    config: ModelConfig
    draft: ModelConfig | None
    on_chip: int
    num_tokens: int
    budget: int
    batch_size: int = 1
    itemsize: int = 2
    num_gpus: int = 1
    is_fused: bool = True
    has_copy: bool = False
    """The retrieval level reads weights of 8 bits."""

    @property
    def share(self) -> ModelConfig:
        """What each GPU has of the target."""
        ranks = Ranks()
        ranks.count = self.num_gpus
        return share_of(self.config, ranks)

    def read(
        self, name: str, per_step: float, model: ModelConfig, num_slots: float, T: float,
        *, hosted: int = 0,
    ) -> Phase:  # fmt: skip
        """A pass over T tokens of each row behind `num_slots`, `hosted` layers from the host."""
        B, size, L, n = self.batch_size, self.itemsize, model.num_layers, self.num_gpus
        kv_bytes = B * num_slots * kv_bytes_per_token(model, size)
        has_copy = name == "retrieval verification" and self.has_copy
        numbers = weights_per_pass(model)
        heads_width = model.num_heads * model.head_dim
        around, each = LAUNCHES["fused" if self.is_fused else "plain"]
        launches, eager = float(around + each * L), 0.0
        if hosted:  # passes over a cache in host memory are not captured
            launches, eager = 0.0, launches + HOSTED_COPIES * B * model.num_kv_heads * hosted
        is_split = n > 1 and model is not self.draft
        sent = 2 * (2 * L + 1) * model.hidden_size * (n - 1) / n + (n - 1) * model.vocab_size
        is_verdict = name != "draft step"
        return Phase(
            name, per_step, kv_bytes=kv_bytes, link_bytes=kv_bytes * hosted / L, launches=launches,
            weight_bytes=eight_bit_bytes(model) if has_copy else numbers * size,
            sent_bytes=is_split * B * T * size * sent, sums=is_split * (2 * L + 2),
            flops=B * T * (2 * numbers + 4 * heads_width * L * num_slots),
            eager_launches=eager + (VERDICT_LAUNCHES if is_verdict else SAMPLE_LAUNCHES),
            round_trips=int(is_verdict), model=model,
        )  # fmt: skip

    def commit(self, num_tokens: float) -> Phase:
        """Tokens of a step join the small caches, which are rebuilt at a stride."""
        share, stride = self.share, SpeculationConfig.rebuild_stride
        slot, L = self.batch_size * kv_bytes_per_token(share, self.itemsize), share.num_layers
        is_kept = self.on_chip == L  # means, rather than all keys
        scored = self.num_tokens / 2 / (SpeculationConfig.chunk_size if is_kept else 1)
        rebuilds = num_tokens / stride
        return Phase(
            "commit", 1.0, kv_bytes=slot * (2 * num_tokens + rebuilds * (scored + 2 * self.budget)),
            eager_launches=COMMIT_LAUNCHES + rebuilds * REBUILD_LAUNCHES * L,
        )  # fmt: skip

    def prefill(self, chunk: int) -> Phase:
        """A chunk of the prompt, on average; nothing is verified, nothing captured. What goes to
        host memory is written once."""
        hosted = self.share.num_layers - self.on_chip
        read = dataclasses.replace(self, is_fused=False).read(
            "prefill chunk", 0.0, self.share, self.num_tokens / 2, chunk
        )
        to_host = self.batch_size * chunk * kv_bytes_per_token(self.share, self.itemsize)
        link_bytes = to_host * hosted / self.share.num_layers
        return dataclasses.replace(
            read, launches=0.0, eager_launches=read.launches, round_trips=0, link_bytes=link_bytes
        )

    def phases(self, plan: StepPlan, acceptance: tuple[float, float]) -> tuple[list[Phase], float]:
        """What a step by this plan consists of, and the tokens that it makes."""
        rate, length, num_rounds = acceptance[0], float(plan.gamma1), float(plan.uses_drafter)
        if plan.uses_retrieval:
            per_round = expected_tokens(acceptance[0], plan.gamma1)
            length, num_rounds = expected_block(per_round, plan)
            rate = acceptance[1]
        num_tokens, phases = expected_tokens(rate, length), []
        if plan.uses_drafter and self.draft is not None:
            window = SpeculationConfig.num_sink_tokens + SpeculationConfig.num_recent_tokens
            num_drafted = num_rounds * plan.gamma1
            phases.append(self.read("draft step", num_drafted, self.draft, window, 1))
        if plan.uses_retrieval:
            options = ("retrieval verification", num_rounds, self.share, self.budget)
            phases.append(self.read(*options, plan.gamma1 + 1))
        hosted = self.share.num_layers - self.on_chip
        options = ("target verification", 1.0, self.share, self.num_tokens)
        phases.append(self.read(*options, length + 1, hosted=hosted))
        if plan.uses_retrieval:
            phases.append(self.commit(num_tokens))
        return phases, num_tokens


def predict(
    work: Workload, machine: Machine, plan: StepPlan, acceptance: tuple[float, float]
) -> dict[str, Any]:
    """Milliseconds of each phase and per token, if guesses of the drafter and of the retrieval
    level are accepted at these rates."""
    phases, num_tokens = work.phases(plan, acceptance)
    alone = work.phases(StepPlan("autoregressive"), acceptance)[0][0].ms(machine)
    ms = dict.fromkeys(("draft", "retrieval", "target", "commit"), 0.0)
    ms |= {phase.stage: phase.ms(machine) for phase in phases}
    cascade = sum(phase.per_step * ms[phase.stage] for phase in phases) / num_tokens
    ms |= {"cascade": cascade, "autoregressive": alone, "speedup": alone / cascade}
    return {"plan": dataclasses.asdict(plan), **ms}


def table(phases: list[Phase], machine: Machine, measured: dict[str, float] | None = None) -> str:
    """Phases as lines, predicted and, where there is any, measured milliseconds."""
    columns = "per step", "weights MB", "KV MB", "link MB", "sent MB", "GFLOP", "in graph", "eager"
    titles = (*columns, "waits", "ms", *(["measured"] if measured is not None else []))
    lines = [f"{'':24s}" + "".join(f"{title:>11}" for title in titles)]
    for it in phases:
        sizes = it.weight_bytes, it.kv_bytes, it.link_bytes, it.sent_bytes
        cells = [f"{it.per_step:.2f}", *(f"{size / 1e6:.1f}" for size in sizes)]
        cells += [f"{it.flops / 1e9:.1f}", f"{it.launches:.0f}", f"{it.eager_launches:.0f}"]
        cells += [str(it.round_trips), f"{it.ms(machine):.3f}"]
        if measured is not None:
            cells.append(f"{measured[it.stage]:.3f}" if it.stage in measured else "")
        lines.append(f"{it.name:24s}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)
