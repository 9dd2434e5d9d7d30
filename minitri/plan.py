"""What fits where, before anything is loaded: `python -m minitri.plan`.

    python -m minitri.plan --model llama2-7b-128k --context 124928 --gpu-memory 24 --host-memory 256 --link-gb-s 25

prints the bytes of weights, caches and activations on the device and in host memory for several placements, which of
them fit, how many layers may keep their KV on the device, and the milliseconds per token to be expected, autoregressive
and with the cascade; gammas that are not given are those that make them fewest, if a pass over more tokens takes no
longer. It is the arithmetic (`placement.py`) that an engine boots with. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitri.model.config import ModelConfig, unknown_model
from minitri.errors import InputError
from minitri.cli.exits import clean_exits

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.loading.checkpoint import open_checkpoint
    from minitri.loading.fetch import committed_path, default_draft
    from minitri.cli.arguments import (
        OneLineParser,
        add_draft_flag,
        add_size_flags,
        positive,
        speculation_of,
        two_rates,
    )
    from minitri.generate import run_program
    from minitri.gpu.placement import GIB, Demand, Machine, Prediction, demand, predict, shortage
    from minitri.loading.shapes import shape_of


def build_parser() -> OneLineParser:
    """The flags of the plan."""
    parser = OneLineParser(
        prog="python -m minitri.plan",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host memory, and how fast "
        "that can be.",
        epilog="examples:\n  python -m minitri.plan --model llama2-7b-128k --context 124928 --gpu-memory 24\n"
        "  python -m minitri.plan --model lwm-text-512k --context 524288 --gpu-memory 80 --link-gb-s 50",
    )
    parser.add_argument(
        "--model", default="llama2-7b-128k", metavar="NAME|PATH",
        help="a named model, or a folder or file whose config is read (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens, prompt and output (default: all it holds)",
    )
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="sequences (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of weights and KV cache (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill-chunk", type=positive, default=1024, metavar="N", help="(default: %(default)s)"
    )
    machine = parser.add_argument_group("machine")
    for name, default, text in (
        ("gpu-memory", 24.0, "memory of the GPU in GiB"),
        ("host-memory", 256.0, "host memory that may be page-locked, in GiB"),
        (
            "gpu-gb-s",
            None,
            "GB/s at which the GPU reads its memory (default: by its size, 1000, 2000 or 4000)",
        ),
        ("link-gb-s", 25.0, "GB/s from host memory to the GPU: 25 for PCIe 4.0 x16, 50 for 5.0"),
    ):
        shown = "" if default is None else " (default: %(default)g)"
        machine.add_argument(
            f"--{name}", type=positive_number, default=default, metavar="X", help=text + shown
        )
    group = parser.add_argument_group("speculation")
    add_draft_flag(group)
    group.add_argument(
        "--acceptance", type=two_rates, default=(0.46, 0.92), metavar="DRAFT,RETRIEVAL",
        help="acceptance rates to reckon with (default: 0.46,0.92, about the paper's)",
    )  # fmt: skip
    add_size_flags(group)
    parser.set_defaults(method="triforce", policy="retrieval", coupled=False, seed=0, quiet=False)
    return parser


def positive_number(text: str) -> float:
    """A flag's value that must be a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def config_of(name: str) -> ModelConfig:
    """The shape of a model, without its weights. Raises `InputError`."""
    if Path(name).exists():
        return open_checkpoint(Path(name)).config(Path(name).stem)
    if (committed := committed_path(name)) is not None:
        return open_checkpoint(committed).config(name)
    if (shape := shape_of(name)) is None:
        raise unknown_model(name)
    return shape


def draft_config(args: argparse.Namespace) -> ModelConfig | None:
    """The drafter's shape, or None for n-grams or none."""
    name = default_draft(args.model) if args.draft == "auto" else args.draft
    return None if name in ("ngram", "none") else config_of(name)


@dataclass(frozen=True)
class Placement:
    """So many layers with their KV on the GPU, in bytes and in milliseconds."""

    on_chip: int
    fits: bool
    needs: Demand
    predicted: Prediction

    def as_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "on_chip": self.on_chip,
            "fits": self.fits,
            "device_bytes": self.needs.on_device(self.on_chip),
            "host_bytes": self.needs.on_host(self.on_chip),
            "parts": self.needs.parts(self.on_chip),
            "predicted_ms": {
                **dataclasses.asdict(self.predicted),
                "speedup": self.predicted.speedup,
            },
        }


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    config, draft = config_of(args.model), draft_config(args)
    context = args.context or config.context_length
    speculation = speculation_of(args)
    size = {
        "batch_size": args.batch,
        "num_tokens": context,
        "itemsize": 4 if args.dtype == "float32" else 2,
    }
    needs = demand(
        config, draft, speculation, num_tokens=context, prompt_lengths=[context] * args.batch,
        prefill_chunk=args.prefill_chunk, itemsize=size["itemsize"],
    )  # fmt: skip
    gpu_bytes, host_bytes = args.gpu_memory * GIB, args.host_memory * GIB
    gpu_gb_s = args.gpu_gb_s or (
        1000 if args.gpu_memory <= 48 else 2000 if args.gpu_memory <= 80 else 4000
    )
    machine = Machine(gpu_gb_s * 1e9, args.link_gb_s * 1e9)
    best, budget = needs.most_on_chip(gpu_bytes), speculation.budget_for(context)

    def place(on_chip: int) -> Placement:
        fits = needs.on_device(on_chip) <= gpu_bytes and needs.on_host(on_chip) <= host_bytes
        predictions = (
            predict(
                config,
                draft,
                machine,
                on_chip=on_chip,
                budget=budget,
                plan=plan,
                acceptance=args.acceptance,
                **size,
            )
            for plan in speculation.plans
        )
        return Placement(
            on_chip, fits, needs, min(predictions, key=lambda predicted: predicted.cascade)
        )

    placements = [
        place(n)
        for n in sorted({config.num_layers, 0, *([] if best is None else [best])}, reverse=True)
    ]
    print(
        f"{config.name}, {context} tokens, batch {args.batch}, {args.dtype}, drafter "
        f"{draft.name if draft else 'ngram'}, budget {budget}; a GPU of {args.gpu_memory:g} GiB at {gpu_gb_s:g} GB/s, "
        f"{args.host_memory:g} GiB of host memory over {args.link_gb_s:g} GB/s"
    )
    print(table(placements))
    rows = [placement.as_dict() for placement in placements]
    print(
        json.dumps({"model": config.name, "context": context, "on_chip": best, "placements": rows})
    )
    if (missing := shortage(needs, gpu_bytes, host_bytes, config.name)) is not None:
        raise InputError(missing)
    return 0


def table(placements: list[Placement]) -> str:
    """Placements as columns."""

    def line(name: str, cells: Iterable[object]) -> str:
        return f"{name:34s}" + "".join(f"{cell:>18}" for cell in cells)

    def numbers(name: str, value: Callable[[Placement], float]) -> str:
        return line(name, (f"{value(placement):.2f}" for placement in placements))

    needs = placements[0].needs
    L = needs.num_layers
    heads = [
        "all" if placement.on_chip == L else f"{placement.on_chip} of {L} layers"
        for placement in placements
    ]
    parts = [
        line(
            f"  {name}, GiB",
            (f"{needs.parts(placement.on_chip)[name] / GIB:.2f}" for placement in placements),
        )
        for name in needs.parts(0)
    ]
    return "\n".join(
        [
            line("KV cache on the GPU", heads),
            *parts,
            numbers("on the GPU, GiB", lambda placement: needs.on_device(placement.on_chip) / GIB),
            numbers(
                "in host memory, GiB", lambda placement: needs.on_host(placement.on_chip) / GIB
            ),
            line("fits", ("yes" if placement.fits else "no" for placement in placements)),
            numbers("draft step, ms", lambda placement: placement.predicted.draft),
            numbers("retrieval verification, ms", lambda placement: placement.predicted.retrieval),
            numbers("full verification, ms", lambda placement: placement.predicted.target),
            numbers("autoregressive, ms/token", lambda placement: placement.predicted.target),
            line(
                "gamma1, gamma2",
                (
                    f"{plan.gamma1}, {plan.gamma2}"
                    for plan in (p.predicted.plan for p in placements)
                ),
            ),
            numbers("cascade, ms/token", lambda placement: placement.predicted.cascade),
            numbers("speedup", lambda placement: placement.predicted.speedup),
        ]
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.plan`."""
    run_program(build_parser(), run_command, argv)


if __name__ == "__main__":
    main()
