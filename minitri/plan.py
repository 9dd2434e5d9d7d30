"""What of a model fits where, and how fast it can be: `python -m minitri.plan`, loading nothing.

    python -m minitri.plan --model llama2-7b-128k --context 124928 --gpu-memory 24

prints, for several placements of the KV cache, the bytes on the device and in host memory, whether
they fit, and the milliseconds per token to expect, autoregressive and with the cascade. Gammas that
are not given are the fastest ones, if a pass over more tokens takes no longer. Bytes come from
`gpu/placement.py`, with which an engine boots, times from `phases.py`. The last line is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import json
    import sys
    from pathlib import Path
    from typing import Any

    from minitri.cli import arguments
    from minitri.config import ModelConfig
    from minitri.errors import InputError, shorten
    from minitri.gpu.placement import CONTEXT, GIB, Demand, shortage
    from minitri.loading.checkpoint import open_checkpoint
    from minitri.loading.fetch import LOOKUPS, committed_path, default_draft
    from minitri.loading.named_models import shape_of, unknown_model
    from minitri.phases import CARDS, phase_table, phases, predict, prefill
    from minitri.roofline import Machine, Workload, eight_bit_bytes, four_bit_bytes
    from minitri.settings import SpeculationConfig, StepPlan


def build_parser() -> arguments.OneLineParser:
    """The flags of the plan."""
    parser = arguments.OneLineParser(
        "plan",
        "--model llama2-7b-128k --context 124928 --gpu-memory 24",
        "--model lwm-text-512k --context 524288 --gpu-memory 80 --link-gb-s 50",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, and how fast that can be.",
    )
    add = parser.add_argument
    count = arguments.positive
    number = positive_number
    text = "a named model, or a folder or file whose config is read"
    add("-m", "--model", metavar="NAME|PATH", default="llama2-7b-128k", help=text)
    text = "tokens, prompt and output (default: all it holds)"
    add("--context", type=count, metavar="N", help=text)
    add("--batch", type=arguments.whole(1, 65536), metavar="N", default=1, help="sequences")
    text = "tokens of the prompt read at a time"
    add("--prefill-chunk", type=count, metavar="N", default=1024, help=text)
    text = "of weights and KV cache"
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help=text)
    group = parser.add_argument_group("machine")
    for name, default, text in (
        ("gpu-memory", 24, "nominal memory of a GPU in GiB"),
        ("host-memory", 256, "memory that may be page-locked, in GiB"),
        (
            "gpu-gb-s",
            None,
            "GB/s at which the GPU reads its memory (default: by its size, 1000, 2000 or 4000)",
        ),
        ("link-gb-s", 25, "GB/s from host memory to each GPU: 25 for PCIe 4.0 x16, 50 for 5.0"),
    ):
        group.add_argument(f"--{name}", type=number, metavar="X", default=default, help=text)
    text = "GPUs that share the model by tensor parallelism (torchrun)"
    group.add_argument("--gpus", type=arguments.whole(1, 64), metavar="N", default=1, help=text)
    text = "print bytes and FLOPs of each phase"
    group.add_argument("--explain", action="store_true", help=text)
    group = parser.add_argument_group("speculation")
    text = "of the retrieval level: the model's own, or a copy in 8 bits"
    group.add_argument("--draft-weights", choices=("same", "int8"), default="same", help=text)
    arguments.add_rates_flag(group, "acceptance", "acceptance rates to expect")
    arguments.add_draft_flag(group)
    arguments.add_size_flags(group)
    parser.set_defaults(method="triforce", seed=0, quiet=False)
    return parser


def positive_number(text: str) -> float:
    """A flag's value that must be a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below 1e9")
    return value


def config_of(name: str) -> ModelConfig:
    """The shape of a model, without its weights. Raises `InputError`."""
    if (shape := shape_of(name)) is not None:
        return shape
    try:
        path = committed_path(name) or Path(name).expanduser()
        is_there = name != "" and path.exists()
    except (OSError, RuntimeError, ValueError):  # no path at all; an unknown home, a NUL
        is_there = False
    if not is_there:
        raise unknown_model(shorten(name, 60))
    return open_checkpoint(path).config(path.resolve().name)


def draft_config(args: argparse.Namespace) -> ModelConfig | None:
    """The shape of the drafter; None if it is no model."""
    name = default_draft(args.model) if args.draft == "auto" else args.draft
    return None if name in (*LOOKUPS, "none") else config_of(name)


def machine_of(args: argparse.Namespace) -> Machine:
    """A card of this size, with the bandwidths that are given."""
    card = next(card for most, card in CARDS.items() if args.gpu_memory <= most)
    memory = 1e9 * args.gpu_gb_s if args.gpu_gb_s else card.kv_bytes_per_second
    return dataclasses.replace(
        card,
        weight_bytes_per_second=memory,
        kv_bytes_per_second=memory,
        link_bytes_per_second=1e9 * args.link_gb_s,
    )


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    config = config_of(args.model)
    draft = draft_config(args)
    context = args.context or config.context_length
    itemsize = 4 if args.dtype == "float32" else 2
    speculation = arguments.speculation_of(args)
    has_copy = args.draft_weights != "same"
    how = (args.prefill_chunk, itemsize, args.gpus, has_copy)
    needs = Demand(config, draft, speculation, context, [context] * args.batch, *how)
    L = config.num_layers
    share = config.share(args.gpus)
    work = Workload(
        share,
        draft,
        context * args.batch,
        speculation.budget_for(context) * args.batch,
        itemsize=itemsize,
        retrieval_bytes=eight_bit_bytes(share) if has_copy else None,
        batch_size=args.batch,
        num_gpus=args.gpus,
    )
    gpu_bytes, host_bytes = args.gpu_memory * GIB - CONTEXT, args.host_memory * GIB / args.gpus
    machine = machine_of(args)

    best = needs.most_on_chip(gpu_bytes)
    placements = [
        place(on_chip, needs, work, speculation, machine, (gpu_bytes, host_bytes), args.acceptance)
        for on_chip in sorted({L, best or 0, 0}, reverse=True)
    ]
    speed = machine.kv_bytes_per_second / 1e9
    print(
        f"{config.name}, {context} tokens, batch {args.batch}, {args.dtype}, drafter "
        f"{draft.name if draft else 'suffix'}, budget {speculation.budget_for(context)}; "
        f"{args.gpus} GPU of {args.gpu_memory:g} GiB, {gpu_bytes / GIB:.1f} of them free, at "
        f"{speed:g} GB/s, {args.host_memory:g} GiB of host memory over {args.link_gb_s:g} GB/s per "
        "GPU"
    )
    print(table(placements, L))
    if args.explain:
        chosen = next(row for row in placements if row["on_chip"] == (best or 0))
        here = dataclasses.replace(work, hosted_share=1 - chosen["on_chip"] / L)
        explain(here, machine, StepPlan(**chosen["predicted_ms"]["plan"]), args)
    copy_bytes = four_bit_bytes(config)
    print(f"On a CPU guesses take a copy in 4 bits, {copy_bytes / GIB:.2f} GiB (--draft-weights).")
    result = {"model": config.name, "context": context, "on_chip": best, "placements": placements}
    print(json.dumps(result | {"draft_weights_bytes": copy_bytes}))
    if (missing := shortage(needs, gpu_bytes, host_bytes)) is not None:
        raise InputError(missing)
    return 0


def place(
    on_chip: int,
    needs: Demand,
    work: Workload,
    speculation: SpeculationConfig,
    machine: Machine,
    free_bytes: tuple[float, float],
    acceptance: tuple[float, float],
) -> dict[str, Any]:
    """What is where with K and V of this number of layers on the GPU, and how fast that can be.

    `free_bytes` are those of the GPU and of host memory.
    """
    context = work.num_tokens // work.batch_size

    def fits(num_rows: int) -> bool:
        more = dataclasses.replace(needs, prompt_lengths=[context] * num_rows)
        return more.on_device(on_chip) <= free_bytes[0] and more.on_host(on_chip) <= free_bytes[1]

    here = dataclasses.replace(work, hosted_share=1 - on_chip / needs.config.num_layers)
    plans = (predict(here, machine, plan, acceptance) for plan in speculation.plans)
    return {
        "on_chip": on_chip,
        "fits": fits(work.batch_size),
        "rows_that_fit": next((n - 1 for n in range(1, 1001) if not fits(n)), 1000),
        "device_bytes": needs.on_device(on_chip),
        "host_bytes": needs.on_host(on_chip),
        "parts": needs.parts(on_chip),
        "predicted_ms": min(plans, key=lambda ms: ms["cascade"]),
    }


def explain(work: Workload, machine: Machine, plan: StepPlan, args: argparse.Namespace) -> None:
    """Prints what the phases of the best placement need, on each GPU."""
    found, num_tokens = phases(work, plan, args.acceptance)
    chunk = prefill(work, args.prefill_chunk)
    found += [("autoregressive", 0.0, work.read("target", 0)), ("prefill chunk", 0.0, chunk)]
    print(f"\n{plan}, {num_tokens:.2f} tokens a step:")
    print(phase_table(found, machine))
    seconds = chunk.seconds(machine) * work.num_tokens / work.batch_size / args.prefill_chunk
    print(f"The prompt takes {seconds:.0f} s. Constants: {machine}")


def table(placements: list[dict[str, Any]], L: int) -> str:
    """Placements of L layers as columns."""
    columns = []
    for placement in placements:
        on_chip = placement["on_chip"]
        ms = placement["predicted_ms"]
        columns.append(
            {
                "KV cache on the GPU": "all" if on_chip == L else f"{on_chip} of {L} layers",
                **{f"  {name}, GiB": size / GIB for name, size in placement["parts"].items()},
                "on the GPU, GiB": placement["device_bytes"] / GIB,
                "in host memory, GiB": placement["host_bytes"] / GIB,
                "fits": "yes" if placement["fits"] else "no",
                "sequences that fit": placement["rows_that_fit"],
                "draft step, ms": ms["draft"],
                "retrieval verification, ms": ms["retrieval"],
                "full verification, ms": ms["target"],
                "commit, ms": ms["commit"],
                "autoregressive, ms/token": ms["autoregressive"],
                "gamma1, gamma2": "{gamma1}, {gamma2}".format(**ms["plan"]),
                "cascade, ms/token": ms["cascade"],
                "speedup": ms["speedup"],
            }
        )
    lines = []
    for name in columns[0]:
        cells = (column[name] for column in columns)
        shown = (f"{cell:.2f}" if isinstance(cell, float) else cell for cell in cells)
        lines.append(f"{name:34s}" + "".join(f"{cell:>18}" for cell in shown))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.plan`."""
    with program(build_parser, argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
