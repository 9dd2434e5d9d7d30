"""Predicted bytes, FLOPs and milliseconds of each forward pass, to hold measurements against."""

import dataclasses

from minitri.core.roofline import Machine, Workload
from minitri.core.settings import StepPlan

HEAD = f"{'':16s}  weights MB       KV MB     link MB       GFLOP          ms"
ROW = "{:16s}" + 5 * "{:12.3f}"


def pass_table(work: Workload, plan: StepPlan, prefill_chunk: int, machine: Machine) -> str:
    """Predicted bytes, FLOPs and milliseconds of the passes of a step, of autoregressive decoding,
    and of an average prefill chunk, whose K and V of hosted layers are written to the host once."""
    passes = {
        "target": work.read("target", plan.gamma2 or plan.gamma1),
        "autoregressive": work.read("target", 0),
    }
    if "retrieval" in plan.proposers:
        passes["retrieval"] = work.read("retrieval", plan.gamma1)
    if "draft" in plan.proposers and work.draft is not None:
        passes["draft"] = work.read("draft", 0)
    half = dataclasses.replace(work, num_tokens=work.num_tokens // 2, hosted_share=0.0)
    chunk = half.read("target", prefill_chunk - 1)
    written = work.hosted_share * prefill_chunk * work.target.kv_values_per_token * work.itemsize
    passes["prefill chunk"] = dataclasses.replace(chunk, link_bytes=written)
    lines = [HEAD]
    for name, one in passes.items():
        sizes = (one.weight_bytes / 1e6, one.kv_bytes / 1e6, one.link_bytes / 1e6, one.flops / 1e9)
        lines.append(ROW.format(name, *sizes, 1e3 * one.seconds(machine)))
    return "\n".join(lines)
