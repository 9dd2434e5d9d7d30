"""The phases of a step of decoding, and the milliseconds that follow from what each of them reads,
moves and computes (`roofline.py`), so that a measurement can contradict them line by line.

Nothing here is measured; every constant is stated with where it comes from. `python -m minitri.plan
--explain` prints the phases, `python -m tools.bench --load dummy` next to what was measured.
"""

import dataclasses
from typing import Any

from minitri.decoding.autotuner import expected_block, expected_tokens
from minitri.roofline import Machine, Pass, Workload
from minitri.settings import SpeculationConfig, StepPlan

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
there. A layer is 12 launches in a CUDA graph, a pass a verdict and a copy to the host, a sum an
all-reduce without NVLink. The link is PCIe 4.0 x16."""
Phase = tuple[str, float, Pass]
"""A name that begins with the stage, occurrences in a step of decoding, and what one needs."""


def phases(
    work: Workload, plan: StepPlan, acceptance: tuple[float, float]
) -> tuple[list[Phase], float]:
    """What a step by this plan consists of, and the tokens per row that it makes, if guesses of the
    drafter and of the retrieval level are accepted at these rates."""
    rate = acceptance[0]
    length = float(plan.gamma1)
    num_rounds = float(plan.uses_drafter)
    if plan.uses_retrieval:
        per_round = expected_tokens(acceptance[0], plan.gamma1)
        length, num_rounds = expected_block(per_round, plan)
        rate = acceptance[1]
    num_tokens = expected_tokens(rate, length)
    found = list[Phase]()
    if plan.uses_drafter and work.draft is not None:
        found.append(("draft step", num_rounds * plan.gamma1, work.read("draft", 0)))
    if plan.uses_retrieval:
        found.append(("retrieval verification", num_rounds, work.read("retrieval", plan.gamma1)))
    found.append(("target verification", 1.0, work.read("target", length)))
    if plan.uses_retrieval:
        found.append(("commit", 1.0, commit(work, num_tokens)))
    return found, num_tokens


def commit(work: Workload, num_tokens: float) -> Pass:
    """Tokens of a step join the small caches, which are rebuilt at a stride: all chunk means are
    scored, or all keys where K and V are in host memory, and the best chunks copied."""
    num_rebuilds = num_tokens / SpeculationConfig.rebuild_stride
    unit = 1 if work.hosted_share else SpeculationConfig.chunk_size
    num_slots = 2 * work.batch_size * num_tokens
    num_slots += num_rebuilds * (work.num_tokens / 2 / unit + 2 * work.num_retrieved)
    slot_bytes = work.target.kv_values_per_token * work.itemsize
    return Pass(num_rebuilds * work.target.num_layers, kv_bytes=num_slots * slot_bytes)


def prefill(work: Workload, chunk: int) -> Pass:
    """A chunk of the prompt, on average; what goes to host memory is written once."""
    half = dataclasses.replace(work, num_tokens=work.num_tokens // 2, hosted_share=0.0)
    slot_bytes = work.target.kv_values_per_token * work.itemsize
    link_bytes = work.hosted_share * work.batch_size * chunk * slot_bytes
    return dataclasses.replace(half.read("target", chunk - 1), link_bytes=link_bytes)


def predict(
    work: Workload, machine: Machine, plan: StepPlan, acceptance: tuple[float, float]
) -> dict[str, Any]:
    """Milliseconds of each phase, and per token with the plan and without speculation."""
    found, num_tokens = phases(work, plan, acceptance)
    alone = 1e3 * work.read("target", 0).seconds(machine)
    ms = dict.fromkeys(("draft", "retrieval", "target", "commit"), 0.0)
    ms |= {name.split()[0]: 1e3 * it.seconds(machine) for name, _, it in found}
    cascade = sum(per_step * ms[name.split()[0]] for name, per_step, _ in found) / num_tokens
    ms |= {"cascade": cascade, "autoregressive": alone, "speedup": alone / cascade}
    return {"plan": dataclasses.asdict(plan), **ms}


def phase_table(
    found: list[Phase], machine: Machine, measured_ms: dict[str, float] | None = None
) -> str:
    """Phases as lines: predicted and, by stage, measured milliseconds."""
    titles = ["per step", "weights MB", "KV MB", "link MB", "GFLOP", "ms"]
    titles += ["measured"] if measured_ms else []
    lines = [f"{'':24s}" + "".join(f"{title:>11}" for title in titles)]
    for name, per_step, it in found:
        sizes = (it.weight_bytes, it.kv_bytes, it.link_bytes)
        cells = [f"{per_step:.2f}", *(f"{size / 1e6:.1f}" for size in sizes)]
        cells += [f"{it.flops / 1e9:.1f}", f"{1e3 * it.seconds(machine):.3f}"]
        if measured_ms:
            ms = measured_ms.get(name.split()[0])
            cells.append("" if ms is None else f"{ms:.3f}")
        lines.append(f"{name:24s}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)
