"""What of a model fits where, and how fast it can be: `python -m minitri.plan`, loading nothing.

For several placements of the KV cache: bytes on the device and in host memory, as an engine counts
them at boot, and milliseconds per token, as the autotuner expects them. The last line is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import functools
    import json
    from typing import Any

    from minitri import ModelConfig
    from minitri.cli import arguments
    from minitri.decoding.autotuner import Autotuner
    from minitri.errors import shorten
    from minitri.fields import between, one_of
    from minitri.gpu.placement import CONTEXT, GIB, Demand, choose_on_chip
    from minitri.loading.fetch import LOOKUPS, default_draft, local_path
    from minitri.loading.named_models import shape_of, unknown_model
    from minitri.roofline import CARDS, Machine, Pass, Workload, copy_bytes
    from minitri.settings import DTYPES, GenerationConfig, StepPlan


ACCEPTANCE = (0.46, 0.92)
"""Of the drafter's guesses and of the retrieval level's: about the paper's."""


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """What this program alone is asked for."""

    model: str = "llama2-7b-128k"
    """A named model, or a folder or file whose config is read."""
    dtype: str = one_of("bfloat16", *DTYPES)
    """Of weights and KV cache."""
    context: int | None = between(None, 1)
    """Tokens, prompt and output. Default: all it holds."""
    gpu_memory: int = between(24, 1)
    """Nominal memory of a GPU in GiB."""
    gpus: int = between(1, 1, 64)
    """GPUs that share the model (torchrun)."""
    host_memory: int = between(256, 1)
    """Memory that may be page-locked, in GiB."""
    link_gb_s: int = between(25, 1)
    """GB/s from the host to a GPU; 50 for PCIe 5.0 x16."""
    explain: bool = False
    """Print bytes and FLOPs of each phase."""
    draft_weights: str = one_of("same", "same", "int8", "int4")
    """Of the retrieval level: the model's own, or a copy in 8 or 4 bits."""


def build_parser() -> arguments.OneLineParser:
    """The flags of the plan."""
    parser = arguments.OneLineParser(
        "plan",
        "--model llama2-7b-128k --context 124928 --gpu-memory 24",
        "--model lwm-text-512k --context 524288 --gpu-memory 80 --link-gb-s 50",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, and how fast that can be.",
    )
    arguments.add_fields(parser, PlanFlags)
    arguments.add_flags(parser, "prefill_chunk")
    arguments.add_flags(parser, "draft", *arguments.SIZES, title="speculation")
    parser.set_defaults(method="triforce", seed=0)
    return parser


def config_of(name: str) -> ModelConfig:
    """The shape of a model, without its weights. Raises `InputError`."""
    if (shape := shape_of(name)) is not None:
        return shape
    path = local_path(name)
    if path is None:
        raise unknown_model(shorten(name, 60))
    with clean_imports():  # PyTorch, for files only
        from minitri.loading.checkpoint import open_checkpoint
    return open_checkpoint(path).config(path.resolve().name)


def demand_of(args: argparse.Namespace) -> Demand:
    """What a run needs on each GPU. Raises `InputError`."""
    config = config_of(args.model)
    context = args.context or config.context_length
    draft = default_draft(args.model) if args.draft == "auto" else args.draft
    return Demand(
        config,
        None if draft in (*LOOKUPS, "none") else config_of(draft),
        arguments.speculation_of(args),
        context,
        [context],
        args.prefill_chunk,
        itemsize=4 if args.dtype == "float32" else 2,
        num_gpus=args.gpus,
        copy_bits={"same": 0, "int8": 8, "int4": 4}[args.draft_weights],
    )


def workload(needs: Demand, on_chip: int) -> Workload:
    """What each GPU decodes at the end of the context."""
    return Workload(
        needs.share,
        needs.draft,
        needs.num_tokens,
        needs.speculation.budget_for(needs.num_tokens),
        itemsize=needs.itemsize,
        hosted_share=1 - on_chip / needs.config.num_layers,
        retrieval_bytes=copy_bytes(needs.share, needs.copy_bits) or None,
    )


def predict(work: Workload, machine: Machine, plans: list[StepPlan]) -> dict[str, Any]:
    """The fastest plan; milliseconds per token with it and without speculation."""
    tuner = Autotuner(plans, functools.partial(work.seconds, machine), use_clock=False)
    for stage, rate in zip(("draft", "retrieval"), ACCEPTANCE, strict=True):
        tuner.note_acceptance(stage, 10**9, round(10**9 * rate))
    best = max(plans, key=tuner.tokens_per_second)
    alone = 1e3 * work.seconds(machine, "target", 0)
    cascade = 1e3 / tuner.tokens_per_second(best)
    ms = {"autoregressive": alone, "cascade": cascade, "speedup": alone / cascade}
    return {"plan": best, **ms}


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    needs = demand_of(args)
    card = next(card for most, card in CARDS.items() if args.gpu_memory <= most)
    machine = dataclasses.replace(card, link_bytes_per_second=1e9 * args.link_gb_s)
    room = (args.gpu_memory * GIB - CONTEXT, args.host_memory * GIB / args.gpus)
    most = needs.most_on_chip(room[0])
    best = most or 0
    print(
        f"{needs.config.name}, {needs.num_tokens} tokens, {args.dtype}; {args.gpus} GPU of "
        f"{args.gpu_memory} GiB at {machine.kv_bytes_per_second / 1e9:g} GB/s\n"
        "layers with KV on the GPU    GiB there  on host  fits  ms alone  cascade  speedup"
    )
    placements = {}
    for on_chip in sorted({needs.config.num_layers, best, 0}, reverse=True):
        placements[on_chip] = {
            "on_chip": on_chip,
            "device_bytes": needs.on_device(on_chip),
            "host_bytes": needs.on_host(on_chip),
            "fits": needs.on_device(on_chip) <= room[0] and needs.on_host(on_chip) <= room[1],
            "parts": needs.parts(on_chip),
            "predicted_ms": predict(workload(needs, on_chip), machine, needs.speculation.plans),
        }
        print(placement_lines(placements[on_chip]))
    if args.explain:
        plan = placements[best]["predicted_ms"]["plan"]
        found = passes(workload(needs, best), plan, args.prefill_chunk)
        print(f"\n{pass_table(found, machine)}\nConstants: {machine}")
    facts = {"model": needs.config.name, "context": needs.num_tokens, "on_chip": most}
    print(json.dumps({**facts, "placements": [*placements.values()]}, default=vars))
    choose_on_chip(needs, GenerationConfig(offload=True), *room)
    return 0


def placement_lines(row: dict[str, Any]) -> str:
    """A placement, and below it what the bytes on the GPU are for."""
    ms = row["predicted_ms"]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["parts"].items())
    return (
        f"{row['on_chip']:25d} {row['device_bytes'] / GIB:12.2f} {row['host_bytes'] / GIB:8.2f} "
        f"{'yes' if row['fits'] else 'no':>5s} {ms['autoregressive']:9.2f} {ms['cascade']:8.2f} "
        f"{ms['speedup']:8.2f}  {ms['plan']}\n    {parts}"
    )


def passes(work: Workload, plan: StepPlan, prefill_chunk: int) -> dict[str, Pass]:
    """The passes of a step by this plan, of autoregressive decoding, and of an average chunk of the
    prompt, whose K and V of hosted layers are written to host memory once."""
    found = {
        "target": work.read("target", plan.gamma2 or plan.gamma1),
        "autoregressive": work.read("target", 0),
    }
    if plan.uses_retrieval:
        found["retrieval"] = work.read("retrieval", plan.gamma1)
    if plan.uses_drafter and work.draft is not None:
        found["draft"] = work.read("draft", 0)
    half = dataclasses.replace(work, num_tokens=work.num_tokens // 2, hosted_share=0.0)
    link_bytes = work.hosted_share * prefill_chunk * work.slot_bytes
    chunk = half.read("target", prefill_chunk - 1)
    return {**found, "prefill chunk": dataclasses.replace(chunk, link_bytes=link_bytes)}


def pass_table(found: dict[str, Pass], machine: Machine) -> str:
    """Passes as lines."""
    lines = [f"{'':16s}  weights MB       KV MB     link MB       GFLOP          ms"]
    for name, it in found.items():
        sizes = (it.weight_bytes / 1e6, it.kv_bytes / 1e6, it.link_bytes / 1e6, it.flops / 1e9)
        numbers = (f"{number:12.3f}" for number in (*sizes, 1e3 * it.seconds(machine)))
        lines.append(f"{name:16s}" + "".join(numbers))
    return "\n".join(lines)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
