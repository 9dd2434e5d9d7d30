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
    import math
    from typing import Any

    from minitri import InputError, ModelConfig
    from minitri.cli import arguments
    from minitri.cli.hardware import ROWS, TABLE, Site, site_named, this_machine
    from minitri.decoding.autotuner import Autotuner
    from minitri.fields import between, one_of
    from minitri.gpu.placement import CONTEXT, GIB, Demand
    from minitri.loading.fetch import (
        LOOKUPS,
        config_folder,
        default_draft,
        local_path,
        repository_of,
    )
    from minitri.loading.named_models import MODELS, shape_of
    from minitri.log import log
    from minitri.roofline import CARDS, Machine, Pass, Workload, copy_bytes
    from minitri.settings import DTYPES, StepPlan


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
    with clean_imports():  # PyTorch, for files only
        from minitri.loading.checkpoint import open_checkpoint
    found = path or config_folder(repository_of(name))
    return open_checkpoint(found).config(found.resolve().name if path else name)


def demand_of(args: argparse.Namespace) -> Demand:
    """What a run needs on each GPU. Raises `InputError`."""
    config = config_of(args.model)
    context = args.context or config.context_length
    warn_if_too_long(args.model, config, context)
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


def warn_if_too_long(model: str, config: ModelConfig, context: int) -> None:
    """Says that a context is beyond the model's, and how it is stretched."""
    trained = config.rope.original_context or config.context_length
    trained = MODELS[model].trained if model in MODELS else trained
    if context > config.context_length:
        log.warning(
            "%s holds %d tokens, not %d; run it with --rope-scaling yarn:%d, or take a lower "
            "--context",
            *(config.name, config.context_length, context, math.ceil(context / trained)),
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


def site_of(args: argparse.Namespace) -> Site:
    """Where it is to run, with what other flags say instead. Raises `InputError`."""
    if args.cpu and args.gpu:
        raise InputError("--cpu and --gpu are two machines; give one of them")
    gib = args.gpu_memory or 24
    machine = next(card for most, card in CARDS.items() if gib <= most)
    site = Site("a GPU", gib, machine, "assumed by its size; --gpu names a card")
    if args.cpu or args.gpu:
        site = this_machine() if args.cpu else site_named(args.gpu)
    machine = site.machine
    if args.link_gb_s:
        machine = dataclasses.replace(machine, link_bytes_per_second=1e9 * args.link_gb_s)
    if site.is_cpu and args.gpus > 1:
        raise InputError(f"--gpus {args.gpus} needs GPUs, not {site.name}; leave it out")
    return site._replace(gib=args.gpu_memory or site.gib, machine=machine)


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    if args.gpu == "list":
        print(TABLE)
        return 0
    needs = demand_of(args)
    site = site_of(args)
    room = (site.gib * GIB - CONTEXT, 0 if site.is_cpu else args.host_memory * GIB / args.gpus)
    L = needs.config.num_layers
    most = needs.most_on_chip(room[0])
    best = L if site.is_cpu else most or 0
    placements: dict[int, Any] = {}
    for on_chip in sorted({L, best, best if site.is_cpu else 0}, reverse=True):
        work = workload(needs, on_chip)
        placements[on_chip] = {
            "on_chip": on_chip,
            "device_bytes": needs.on_device(on_chip),
            "host_bytes": needs.on_host(on_chip),
            "fits": needs.on_device(on_chip) <= room[0] and needs.on_host(on_chip) <= room[1],
            "parts": needs.parts(on_chip),
            "predicted_ms": predict(work, site.machine, needs.speculation.plans),
        }
    if args.json:
        machine = {key: it for key, it in vars(site.machine).items() if math.isfinite(it)}
        hardware = {"name": site.name, "gib": site.gib, "source": site.source, **machine}
        facts = {"model": needs.config.name, "context": needs.num_tokens, "on_chip": most}
        facts |= {"model_context": needs.config.context_length, "hardware": hardware}
        print(json.dumps({**facts, "placements": [*placements.values()]}, default=vars))
    else:
        show(args, needs, site, placements, best)
    if not placements[best]["fits"]:
        raise InputError(nothing_fits(needs, site, best, room))
    return 0


def show(
    args: argparse.Namespace, needs: Demand, site: Site, placements: dict[int, Any], best: int
) -> None:
    """The plan as a table, and what the bytes of the best placement are for."""
    place = "in memory" if site.is_cpu else "on the GPU"
    host = "" if site.is_cpu else f"; host memory: {args.host_memory} GiB at "
    link = f"{site.machine.link_bytes_per_second / 1e9:.3g} GB/s" * (not site.is_cpu)
    print(
        f"{needs.config.name}, {needs.num_tokens} tokens, {args.dtype}\n"
        f"{f'{args.gpus} x ' * (args.gpus > 1)}{site.name}: {site.gib:.1f} GiB at "
        f"{site.machine.weight_bytes_per_second / 1e9:.0f} GB/s ({site.source}){host}{link}\n\n"
        f"layers of KV  {'GiB':>10s}  {'GiB in host':>12s}         predicted ms/token\n"
        f"{place:12s}  {place:>10s}  {'memory':>12s}  fits   alone  speculating  speedup  by"
    )
    print(*map(placement_line, placements.values()), sep="\n")
    print(f"\nGiB {place} with the KV of {best} layers:")
    for name, size in placements[best]["parts"].items():
        print(f"  {name:25s} {size / GIB:8.2f}")
    if args.explain:
        plan = placements[best]["predicted_ms"]["plan"]
        found = passes(workload(needs, best), plan, args.prefill_chunk)
        print(f"\n{pass_table(found, site.machine)}\nConstants: {site.machine}")


def nothing_fits(needs: Demand, site: Site, best: int, room: tuple[float, float]) -> str:
    """What is missing, in a line."""
    text = f"{needs.config.name} with {needs.num_tokens} tokens needs "
    text += f"{needs.on_device(best) / GIB:.2f} GiB on {site.name}, got {room[0] / GIB:.2f}"
    ways = "take a lower --context or --prefill-chunk, a smaller model or --dtype"
    if not site.is_cpu:
        text += f", and {needs.on_host(best) / GIB:.2f} in host memory, got {room[1] / GIB:.2f}"
        ways += ", a larger --gpu or --host-memory, or more --gpus"
    return f"{text}; {ways}"


def placement_line(row: dict[str, Any]) -> str:
    """A placement as a row of the table."""
    ms = row["predicted_ms"]
    return (
        f"{row['on_chip']:12d}  {row['device_bytes'] / GIB:10.2f}  {row['host_bytes'] / GIB:12.2f} "
        f"{'yes' if row['fits'] else 'no':>5s} {ms['autoregressive']:7.1f} {ms['cascade']:12.1f} "
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
