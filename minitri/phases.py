"""The phases of a step of decoding, and the milliseconds that follow from what each of them reads,
moves and computes (`roofline.py`), so that a measurement can contradict them line by line. Updates
of the small caches are left out: they take less than a hundredth of a step.

Nothing here is measured; every constant is stated with where it comes from. `python -m minitri.plan
--explain` prints the phases, `python -m tools.bench --load dummy` next to what was measured.
"""

import dataclasses
from typing import Any

from minitri.decoding.autotuner import expected_block, expected_tokens
from minitri.roofline import Machine, Pass, Workload
from minitri.settings import StepPlan

CARDS = {
    gib: Machine(
        bytes_per_second,
        bytes_per_second,
        25e9,
        seconds_per_layer=16e-6,
        seconds_per_pass=0.15e-3,
        flops_per_second=flops_per_second,
        seconds_per_sum=12e-6,
    )
    for gib, bytes_per_second, flops_per_second in (
        (48, 1e12, 100e12),
        (80, 2e12, 200e12),
        (1e9, 4e12, 500e12),
    )
}
"""By memory in GiB: what smaller cards, an A100 and an H200 read, and the FLOP/s of large products
there. A layer is 10 launches in a CUDA graph, a pass a verdict and a copy to the host, a sum an
all-reduce without NVLink. The link is PCIe 4.0 x16."""
Phases = dict[str, tuple[float, Pass]]
"""By name: occurrences in a step of decoding, and what one needs."""


def phases(work: Workload, plan: StepPlan, acceptance: tuple[float, float]) -> tuple[Phases, float]:
    """What a step by this plan consists of, and the tokens per row that it makes, if guesses of the
    drafter and of the retrieval level are accepted at these rates."""
    found: Phases = {}
    rate = acceptance[0]
    length = float(plan.gamma1)
    num_rounds = 1.0
    if plan.uses_retrieval:
        per_round = expected_tokens(rate, plan.gamma1)
        length, num_rounds = expected_block(per_round, plan)
        rate = acceptance[1]
        found["retrieval"] = num_rounds, work.read("retrieval", plan.gamma1)
    if plan.uses_drafter and work.draft is not None:
        found["draft"] = num_rounds * plan.gamma1, work.read("draft", 0)
    num_tokens = expected_tokens(rate, length)
    found["target"] = 1.0, work.read("target", length)
    return found, num_tokens


def prefill(work: Workload, chunk: int) -> Pass:
    """A chunk of the prompt, on average; what goes to host memory is written once."""
    half = dataclasses.replace(work, num_tokens=work.num_tokens // 2, hosted_share=0.0)
    link_bytes = work.hosted_share * work.batch_size * chunk * work.slot_bytes
    return dataclasses.replace(half.read("target", chunk - 1), link_bytes=link_bytes)


def predict(
    work: Workload, machine: Machine, plan: StepPlan, acceptance: tuple[float, float]
) -> dict[str, Any]:
    """Milliseconds of each phase, and per token with the plan and without speculation."""
    found, num_tokens = phases(work, plan, acceptance)
    alone = 1e3 * work.read("target", 0).seconds(machine)
    ms = {name: 1e3 * it.seconds(machine) for name, (_, it) in found.items()}
    cascade = sum(per_step * ms[name] for name, (per_step, _) in found.items()) / num_tokens
    ms |= {"cascade": cascade, "autoregressive": alone, "speedup": alone / cascade}
    return {"plan": dataclasses.asdict(plan), **ms}


def phase_table(
    found: Phases, machine: Machine, measured_ms: dict[str, float] | None = None
) -> str:
    """Phases as lines: predicted and, by name, measured milliseconds."""
    titles = ["per step", "weights MB", "KV MB", "link MB", "GFLOP", "ms"]
    titles += ["measured"] if measured_ms else []
    lines = [f"{'':16s}" + "".join(f"{title:>12}" for title in titles)]
    for name, (per_step, it) in found.items():
        numbers = [per_step, it.weight_bytes / 1e6, it.kv_bytes / 1e6, it.link_bytes / 1e6]
        numbers += [it.flops / 1e9, 1e3 * it.seconds(machine)]
        numbers += [measured_ms[name]] if measured_ms else []
        lines.append(f"{name:16s}" + "".join(f"{number:12.3f}" for number in numbers))
    return "\n".join(lines)
