"""What of a model fits where, and how fast it can be: `python -m minitri.plan`, loading nothing.

For several placements of the KV cache: bytes on the device and in host memory, as an engine counts
them at boot, and milliseconds per token, as the autotuner expects them.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import functools
    import json
    from typing import Any

    from minitri import InputError, ModelConfig
    from minitri.cli import arguments
    from minitri.cli.hardware import ROWS, TABLE, Site, site_named, this_machine
    from minitri.decoding.autotuner import Autotuner
    from minitri.fields import between, one_of
    from minitri.gpu.placement import CONTEXT, GIB, Demand, MemoryShape, choose_on_chip
    from minitri.loading.fetch import (
        LOOKUPS,
        config_folder,
        default_draft,
        local_path,
        repository_of,
    )
    from minitri.loading.named_models import shape_of
    from minitri.log import log
    from minitri.roofline import CARDS, Machine, Pass, Workload, copy_bytes
    from minitri.settings import DTYPES, GenerationConfig, SamplingParams, StepPlan


ACCEPTANCE = (0.46, 0.92)
"""Of the drafter's guesses and of the retrieval level's: about the paper's."""


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """What this program alone is asked for."""

    model: str = "llama2-7b-128k"
    """A named model, or a folder, file or hub repository ORG/NAME whose config is read."""
    dtype: str = one_of("bfloat16", *DTYPES)
    """Of weights and KV cache."""
    context: int | None = between(None, 1)
    """Tokens, prompt and output. Default: all it holds."""
    gpu: str | None = one_of(None, "list", *ROWS)
    """A card or an Apple chip by name; `list` shows their figures."""
    cpu: bool = False
    """This machine's processor, whose memory is measured."""
    gpu_memory: int | None = between(None, 1)
    """Memory of a GPU in GiB, or of a CPU. Default: that of --gpu or --cpu, else 24."""
    gpus: int = between(1, 1, 64)
    """How many GPUs share the model (torchrun)."""
    host_memory: int = between(256, 1)
    """Memory that may be page-locked, in GiB."""
    link_gb_s: int | None = between(None, 1)
    """How fast a GPU reads host memory, in GB/s. Default: by --gpu, else 25, for PCIe 4.0 x16."""
    explain: bool = False
    """Print bytes and FLOPs of each phase."""
    json: bool = False
    """Print an object for programs."""
    draft_weights: str = one_of("same", "same", "int8", "int4")
    """Of the retrieval level: the model's own, or a copy in 8 or 4 bits."""


def build_parser() -> arguments.OneLineParser:
    """The flags of the plan."""
    parser = arguments.OneLineParser(
        "plan",
        "--model llama2-7b-128k --context 124928 --gpu-memory 24",
        "--model lwm-text-512k --context 524288 --gpu h100 --gpus 2",
        "--model Qwen/Qwen3-8B --gpu l40s",
        "--model smollm2-1.7b --cpu",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, or on a CPU, and how fast that can be.",
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
    found = path or config_folder(repository_of(name))
    with clean_imports():  # PyTorch, for files only
        from minitri.loading.checkpoint import open_checkpoint
    return open_checkpoint(found).config(found.resolve().name if path else name)


def demand_of(args: argparse.Namespace) -> Demand:
    """What a run needs on each GPU. Raises `InputError`."""
    config = config_of(args.model)
    context = args.context or config.context_length
    if context > config.context_length:
        advice = "it needs --rope-scaling, or take a lower --context"
        told = (config.name, config.context_length, context, advice)
        log.warning("%s holds %d tokens, not %d; %s", *told)
    draft = default_draft(args.model) if args.draft == "auto" else args.draft
    generation = GenerationConfig(1, prefill_chunk=args.prefill_chunk)
    return Demand(
        config.share(args.gpus),
        None if draft in (*LOOKUPS, "none") else config_of(draft),
        MemoryShape((context,), SamplingParams(), generation, arguments.speculation_of(args)),
        itemsize=4 if args.dtype == "float32" else 2,
        copy_bits={"same": 0, "int8": 8, "int4": 4}[args.draft_weights],
    )


def workload(needs: Demand, on_chip: int) -> Workload:
    """What each GPU decodes at the end of the context."""
    return Workload(
        needs.config,
        needs.draft,
        needs.num_tokens,
        needs.speculation.budget_for(needs.num_tokens),
        itemsize=needs.itemsize,
        hosted_share=1 - on_chip / needs.config.num_layers,
        retrieval_bytes=copy_bytes(needs.config, needs.copy_bits) or None,
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


def site_of(args: argparse.Namespace) -> Site:
    """Where it is to run, with what other flags say instead. Raises `InputError`."""
    if args.cpu and args.gpu:
        raise InputError("--cpu and --gpu are two machines; give one of them")
    gib = args.gpu_memory or 24
    machine = next(card for most, card in CARDS.items() if gib <= most)
    site = Site("a GPU", gib, machine, "assumed by its size; --gpu names a card")
    if args.cpu or args.gpu:
        site = this_machine() if args.cpu else site_named(args.gpu)
    if site.is_cpu and args.gpus > 1:
        raise InputError(f"--gpus {args.gpus} needs GPUs, not {site.name}; leave it out")
    machine = site.machine
    if args.link_gb_s:
        machine = dataclasses.replace(machine, link_bytes_per_second=1e9 * args.link_gb_s)
    return site._replace(gib=args.gpu_memory or site.gib, machine=machine)


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    if args.gpu == "list":
        print(TABLE)
        return 0
    needs = demand_of(args)
    site = site_of(args)
    L = needs.config.num_layers
    host_bytes = 0 if site.is_cpu else args.host_memory * GIB / args.gpus
    wanted = GenerationConfig(offload=True, on_chip=L if site.is_cpu else None)
    best = choose_on_chip(needs, wanted, site.gib * GIB - CONTEXT, host_bytes)
    choices = sorted({L} if site.is_cpu else {L, best, 0}, reverse=True)
    placements = {on_chip: placement(needs, site, host_bytes, on_chip) for on_chip in choices}
    if args.json:
        facts = {"model": needs.config.name, "context": needs.num_tokens, "on_chip": best}
        facts |= {"model_context": needs.config.context_length, "hardware": site._asdict()}
        print(json.dumps({**facts, "placements": [*placements.values()]}, default=vars))
        return 0
    speed = f"{site.machine.weight_bytes_per_second / 1e9:.0f} GB/s ({site.source})"
    if not site.is_cpu:
        speed += (
            f"; host: {args.host_memory} GiB at {site.machine.link_bytes_per_second / 1e9:.3g} GB/s"
        )
    print(
        f"{needs.config.name}, {needs.num_tokens} tokens, {args.dtype}\n"
        f"{f'{args.gpus} x ' * (args.gpus > 1)}{site.name}: {site.gib:.1f} GiB at {speed}\n\n"
        "layers with KV there  GiB there  GiB on host  fits  ms/token alone  speculating  speedup"
    )
    print(*map(placement_line, placements.values()), sep="\n")
    print(f"\nGiB there with the KV of {best} layers:")
    for name, size in placements[best]["parts"].items():
        print(f"  {name:25s} {size / GIB:8.2f}")
    if args.explain:
        plan = placements[best]["predicted_ms"]["plan"]
        found = passes(workload(needs, best), plan, args.prefill_chunk)
        print(f"\n{pass_table(found, site.machine)}\nConstants: {site.machine}")
    return 0


def placement(needs: Demand, site: Site, host_bytes: float, on_chip: int) -> dict[str, Any]:
    """The bytes with KV of so many layers on the device, and how fast that can be."""
    fits = needs.on_device(on_chip) <= site.gib * GIB - CONTEXT
    return {
        "on_chip": on_chip,
        "device_bytes": needs.on_device(on_chip),
        "host_bytes": needs.on_host(on_chip),
        "fits": fits and needs.on_host(on_chip) <= host_bytes,
        "parts": needs.parts(on_chip),
        "predicted_ms": predict(workload(needs, on_chip), site.machine, needs.speculation.plans),
    }


def placement_line(row: dict[str, Any]) -> str:
    """A placement as a row of the table."""
    ms = row["predicted_ms"]
    return (
        f"{row['on_chip']:20d} {row['device_bytes'] / GIB:10.2f} {row['host_bytes'] / GIB:12.2f} "
        f"{'yes' if row['fits'] else 'no':>5s} {ms['autoregressive']:15.1f} {ms['cascade']:12.1f} "
        f"{ms['speedup']:8.2f}  {ms['plan']}"
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
