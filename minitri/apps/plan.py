"""Placement planner: `minitri plan` says what fits where and how fast it can be, loading nothing.

For several placements of the KV cache: bytes on the device and in host memory, as an engine counts
before a run, and milliseconds per token, as the autotuner predicts. GPUs by name are rows of
hardware.txt: GiB as the driver reports them; GB/s, for the link in one direction, and TFLOP/s."""

import functools
import json
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from minitri import GenerationConfig, InputError, ModelConfig, SamplingParams
from minitri.apps.cli import exits, report
from minitri.apps.cli.arguments import OneLineParser, speculation_of
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.core.offload.placement import CONTEXT, GIB, Demand, choose_on_chip
from minitri.core.roofline import CARDS, CPU, Machine, Workload, card, copy_bytes, default_copy_bits
from minitri.core.shape import MemoryShape
from minitri.files.fetch import LOOKUPS, default_draft, locate_config, on_disk
from minitri.files.named_models import MODELS, ModelChoice

ACCEPTANCE = {"draft": 0.46, "retrieval": 0.92}  # assumed acceptance rates, about the paper's
COLUMNS = "on_chip device_GiB host_GiB fits ms_alone ms_per_token speedup plan"
REACHED = 0.8  # assumed share of a data sheet's GB/s in practice, as 25 of 32 for PCIe 4.0 x16


class Site(NamedTuple):
    """A device to plan for: its name, memory and speeds, and where these numbers come from."""

    name: str
    gib: float
    machine: Machine
    source: str


def site_of_row(row: str) -> Site:
    """Reads a GPU from a row of `hardware.txt`, with speeds that are reached in practice."""
    name, gib, memory, link, tflops, source = row.split(None, 5)
    speeds = [REACHED * 1e9 * float(memory), 0.5e12 * float(tflops), REACHED * 1e9 * float(link)]
    return Site(name, float(gib), card(*speeds), f"{REACHED:.0%} of {source}")


TABLE = Path(__file__).with_name("hardware.txt").read_text("utf-8").rstrip()
SITES = {site.name: site for site in map(site_of_row, TABLE.splitlines()[1:])}


def config_of(name: str) -> ModelConfig:
    """Config of a model, by its name or path, read without weights. Raises `InputError`."""
    if row := MODELS.get(name):
        return row.shape
    files = locate_config(name)
    exits.import_pytorch()  # a named model needs no files
    from minitri.files.checkpoint import open_checkpoint

    return open_checkpoint(files.path).config(files.name)


def demand_of(args: Namespace) -> Demand:
    """Memory that a run by these flags needs on each GPU. Raises `InputError`."""
    config = config_of(args.model)
    longest = config.context_length
    context = args.context or longest
    if context > longest:
        log.warning(
            f"{config.name} holds {longest} tokens, not {context}; see --rope-scaling, --context"
        )
    draft = default_draft(args.model) if args.draft == "auto" else args.draft
    generation = GenerationConfig(1, prefill_chunk=args.prefill_chunk, offload=True)
    return Demand(
        config.share(args.gpus),
        None if draft in LOOKUPS else config_of(draft),
        MemoryShape((context,), SamplingParams(), generation, speculation_of(args)),
        itemsize=4 if args.dtype == "float32" else 2,
        copy_bits={"int8": 8, "int4": 4}.get(args.draft_weights, 0),
    )


def site_of(args: Namespace) -> Site:
    """The device to plan for: by flags, else this machine's GPU, or CPU (sets host_memory to 0)."""
    if args.gpu is not None:
        if not (site := SITES.get(args.gpu.lower())):
            raise InputError(f"there is no --gpu {shorten(args.gpu, 60)}; see --gpu list")
        return site._replace(gib=args.gpu_memory or site.gib)
    gib = args.gpu_memory
    if gib is None:
        exits.import_pytorch()
        import torch

        from minitri.core.memory import free_host_bytes

        if not torch.cuda.is_available():
            args.host_memory = 0
            gib = free_host_bytes() / GIB
            return Site("CPU of this machine", gib, CPU, "free now; speeds are assumed")
        gib = torch.cuda.mem_get_info()[1] / GIB
    machine = next(card for most, card in CARDS.items() if gib <= most)
    return Site("GPU", gib, machine, "assumed by its size; --gpu names one")


def run_command(args: Namespace) -> None:
    """Runs `minitri plan`: prints what fits where. Raises `InputError` if no placement fits."""
    if args.gpu == "list":
        print(TABLE)
        return
    found = on_disk(args.model)
    site = site_of(args)
    is_cpu = site.machine is CPU
    weight_bytes = 0
    quantized = ""
    if is_cpu and found:
        from minitri.files.open_models import OpenModel  # with PyTorch

        with suppress(InputError):  # a folder may have a config alone
            opened = OpenModel(ModelChoice(args.model, args.dtype))
            args.dtype = opened.choice.dtype
            if opened.plan.keeps_quantized:
                weight_bytes = found.path.stat().st_size
                quantized = ", weights quantized as in the file"
    needs = replace(demand_of(args), captures=not is_cpu, weight_bytes=weight_bytes)
    form = args.dtype.replace("auto", "bfloat16")
    room = site.gib * GIB - CONTEXT
    if not is_cpu and args.draft_weights == "auto":
        bits = default_copy_bits(needs.config, room - needs.num_weight_bytes)
        needs = replace(needs, copy_bits=bits)
    host_bytes = args.host_memory * GIB / args.gpus
    best = choose_on_chip(needs, room, host_bytes)
    choices = {needs.config.num_layers, best, 0} if host_bytes else {best}
    rows = [placement(needs, site, host_bytes, n) for n in sorted(choices, reverse=True)]
    if args.json:
        facts = {"model": needs.config.name, "context": needs.num_tokens, "on_chip": best}
        print(json.dumps({**facts, "hardware": site._asdict(), "placements": rows}, default=vars))
    else:
        print(
            f"{needs.config.name}, {needs.num_tokens} tokens, {form}{quantized}",
            f"{args.gpus} x {site.name}, {site.gib:.1f} GiB each; {site.source}",
            f"GB/s: {site.machine.bytes_per_second / 1e9:.0f}, "
            f"from the host {site.machine.link_bytes_per_second / 1e9:.3g}\n",
            report.as_table(COLUMNS, rows),
            f"\nGiB on each device with the KV of {best} layers:",
            *(f"  {name:25s} {size / GIB:8.2f}" for name, size in needs.parts(best).items()),
            sep="\n",
        )


def placement(needs: Demand, site: Site, host_bytes: float, on_chip: int) -> dict[str, Any]:
    """Row of the plan's table, values by `COLUMNS`: memory and speed with the KV cache of `on_chip`
    layers on the device, that of others on the host, which has `host_bytes` for it."""
    work = Workload(  # of each GPU, with a full context
        needs.config,
        needs.draft,
        needs.num_tokens,
        needs.shape.speculation.budget_for(needs.num_tokens),
        itemsize=needs.itemsize,
        hosted_share=1 - on_chip / needs.config.num_layers,
        pass_bytes={
            "target": needs.weight_bytes,
            "retrieval": copy_bytes(needs.config, needs.copy_bits) or needs.weight_bytes,
        },
    )
    plans = needs.shape.speculation.plans
    tuner = Autotuner(plans, functools.partial(work.seconds, site.machine), use_clock=False)
    for stage, rate in ACCEPTANCE.items():
        tuner.note_acceptance(stage, 10**9, round(10**9 * rate))
    best = max(plans, key=tuner.tokens_per_second)
    speed = tuner.tokens_per_second(best)
    alone = work.seconds(site.machine, "target", 0)
    return {
        "on_chip": on_chip,
        "device_GiB": needs.on_device(on_chip) / GIB,
        "host_GiB": needs.on_host(on_chip) / GIB,
        "fits": needs.fits(site.gib * GIB - CONTEXT, host_bytes, on_chip),
        "ms_alone": 1e3 * alone,
        "ms_per_token": 1e3 / speed,
        "speedup": alone * speed,
        "plan": str(best),
    }


main = exits.program(lambda: OneLineParser("plan"), run_command)
