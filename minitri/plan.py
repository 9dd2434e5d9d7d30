"""What of a model fits where, and how fast it can be: `python -m minitri.plan`, loading nothing.

    python -m minitri.plan --model llama2-7b-128k --context 124928 --gpu-memory 24

prints, for several placements of the KV cache, the bytes on the device and in host memory, whether
they fit, and the milliseconds per token to expect, autoregressive and with the cascade. Gammas that
are not given are the fastest ones, if a pass over more tokens takes no longer. Bytes come from
`gpu/placement.py`, with which an engine boots, and times from `model/roofline.py`. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitri.cli.exits import clean_exits, program
from minitri.errors import InputError
from minitri.model.config import ModelConfig, unknown_model

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.cli.arguments import (
        OneLineParser,
        add_draft_flag,
        add_size_flags,
        positive,
        speculation_of,
        two_rates,
    )
    from minitri.decoding.autotuner import expected_block, expected_tokens
    from minitri.gpu.placement import GIB, Demand, demand, shortage
    from minitri.loading.checkpoint import open_checkpoint
    from minitri.loading.fetch import committed_path, default_draft
    from minitri.loading.shapes import shape_of
    from minitri.model.roofline import Machine, kv_bytes_per_token, pass_seconds, weights_per_pass
    from minitri.settings import StepPlan


def build_parser() -> OneLineParser:
    """The flags of the plan."""
    parser = OneLineParser(
        prog="python -m minitri.plan",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, and how fast that can be.",
        epilog="examples:\n  python -m minitri.plan --model llama2-7b-128k --context 124928 "
        "--gpu-memory 24\n  python -m minitri.plan --model lwm-text-512k --context 524288 "
        "--gpu-memory 80 --link-gb-s 50",
    )
    shown = "(default: %(default)s)"
    for name, default, kind, metavar, text in (
        ("model", "llama2-7b-128k", str, "NAME|PATH",
         f"a named model, or a folder or file whose config is read {shown}"),
        ("context", None, positive, "N", "tokens, prompt and output (default: all it holds)"),
        ("batch", 1, positive, "N", f"sequences {shown}"),
        ("prefill-chunk", 1024, positive, "N", shown),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help=f"of weights and KV cache {shown}",
    )  # fmt: skip
    machine = parser.add_argument_group("machine")
    shown, by_size = "(default: %(default)g)", "(default: by its size, 1000, 2000 or 4000)"
    for flag, size, text in (
        ("--gpu-memory", 24.0, f"memory of the GPU in GiB {shown}"),
        ("--host-memory", 256.0, f"host memory that may be page-locked, in GiB {shown}"),
        ("--gpu-gb-s", None, f"GB/s at which the GPU reads its memory {by_size}"),
        ("--link-gb-s", 25.0,
         f"GB/s from host memory to the GPU: 25 for PCIe 4.0 x16, 50 for 5.0 {shown}"),
    ):  # fmt: skip
        machine.add_argument(flag, type=positive_number, default=size, metavar="X", help=text)
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
class Prediction:
    """Milliseconds of each phase and per token."""

    plan: StepPlan
    """The gammas of the cascade."""
    draft: float
    retrieval: float
    target: float
    """A pass over the full cache: an autoregressive token, or the verification of a block."""
    cascade: float
    """Per token, all phases together."""

    @property
    def speedup(self) -> float:
        """Of the cascade over autoregressive decoding."""
        return self.target / self.cascade


def predict(
    config: ModelConfig,
    draft: ModelConfig | None,
    machine: Machine,
    *,
    on_chip: int,
    num_tokens: int,
    budget: int,
    plan: StepPlan,
    acceptance: tuple[float, float],
    batch_size: int = 1,
    itemsize: int = 2,
) -> Prediction:
    """Bytes over bandwidth behind `num_tokens`, if guesses of the drafter and of the retrieval
    level are accepted at these rates."""
    read = itemsize * weights_per_pass(config)
    slot = batch_size * kv_bytes_per_token(config, itemsize)
    hosted = (config.num_layers - on_chip) / config.num_layers
    target = pass_seconds(
        machine, config, weight_bytes=read, kv_bytes=slot * num_tokens,
        link_bytes=hosted * slot * num_tokens,
    )  # fmt: skip
    retrieval = pass_seconds(machine, config, weight_bytes=read, kv_bytes=slot * budget)
    draft_seconds = 0.0
    if draft is not None:
        draft_bytes = itemsize * weights_per_pass(draft)
        draft_seconds = pass_seconds(machine, draft, weight_bytes=draft_bytes)
    length, num_rounds = expected_block(acceptance[0], plan)
    guessing = num_rounds * (plan.gamma1 * draft_seconds + retrieval)
    cascade = (guessing + target) / expected_tokens(acceptance[1], length)
    return Prediction(plan, 1e3 * draft_seconds, 1e3 * retrieval, 1e3 * target, 1e3 * cascade)


@dataclass(frozen=True)
class Placement:
    """So many layers with their KV on the GPU, in bytes and in milliseconds."""

    on_chip: int
    fits: bool
    needs: Demand
    predicted: Prediction

    def as_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        milliseconds = dataclasses.asdict(self.predicted) | {"speedup": self.predicted.speedup}
        return {
            "on_chip": self.on_chip,
            "fits": self.fits,
            "device_bytes": self.needs.on_device(self.on_chip),
            "host_bytes": self.needs.on_host(self.on_chip),
            "parts": self.needs.parts(self.on_chip),
            "predicted_ms": milliseconds,
        }


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    config, draft = config_of(args.model), draft_config(args)
    context, itemsize = args.context or config.context_length, 4 if args.dtype == "float32" else 2
    speculation = speculation_of(args)
    needs = demand(
        config, draft, speculation, num_tokens=context, prompt_lengths=[context] * args.batch,
        prefill_chunk=args.prefill_chunk, itemsize=itemsize,
    )  # fmt: skip
    gpu_bytes, host_bytes = args.gpu_memory * GIB, args.host_memory * GIB
    nominal = 1000 if args.gpu_memory <= 48 else 2000 if args.gpu_memory <= 80 else 4000
    gpu_gb_s = args.gpu_gb_s or nominal
    machine = Machine(gpu_gb_s * 1e9, gpu_gb_s * 1e9, args.link_gb_s * 1e9)
    best, budget = needs.most_on_chip(gpu_bytes), speculation.budget_for(context)

    def place(on_chip: int) -> Placement:
        fits = needs.on_device(on_chip) <= gpu_bytes and needs.on_host(on_chip) <= host_bytes
        predictions = (
            predict(
                config, draft, machine, on_chip=on_chip, num_tokens=context, budget=budget,
                plan=plan, acceptance=args.acceptance, batch_size=args.batch, itemsize=itemsize,
            )
            for plan in speculation.plans
        )  # fmt: skip
        fastest = min(predictions, key=lambda predicted: predicted.cascade)
        return Placement(on_chip, fits, needs, fastest)

    choices = {config.num_layers, 0} | ({best} if best is not None else set())
    placements = [place(on_chip) for on_chip in sorted(choices, reverse=True)]
    print(
        f"{config.name}, {context} tokens, batch {args.batch}, {args.dtype}, drafter "
        f"{draft.name if draft else 'ngram'}, budget {budget}; a GPU of {args.gpu_memory:g} GiB at "
        f"{gpu_gb_s:g} GB/s, {args.host_memory:g} GiB of host memory over {args.link_gb_s:g} GB/s"
    )
    print(table(placements))
    rows = [placement.as_dict() for placement in placements]
    result = {"model": config.name, "context": context, "on_chip": best, "placements": rows}
    print(json.dumps(result))
    if (missing := shortage(needs, gpu_bytes, host_bytes, config.name)) is not None:
        raise InputError(missing)
    return 0


def table(placements: list[Placement]) -> str:
    """Placements as columns."""

    def line(name: str, cell: Callable[[Placement], object]) -> str:
        return f"{name:34s}" + "".join(f"{cell(placement):>18}" for placement in placements)

    def number(name: str, value: Callable[[Placement], float]) -> str:
        return line(name, lambda place: f"{value(place):.2f}")

    def part(name: str) -> str:
        return number(f"  {name}, GiB", lambda place: place.needs.parts(place.on_chip)[name] / GIB)

    needs = placements[0].needs
    L = needs.num_layers
    lines = [
        line(
            "KV cache on the GPU",
            lambda p: "all" if p.on_chip == L else f"{p.on_chip} of {L} layers",
        ),
        *map(part, needs.parts(0)),
        number("on the GPU, GiB", lambda p: needs.on_device(p.on_chip) / GIB),
        number("in host memory, GiB", lambda p: needs.on_host(p.on_chip) / GIB),
        line("fits", lambda p: "yes" if p.fits else "no"),
        number("draft step, ms", lambda p: p.predicted.draft),
        number("retrieval verification, ms", lambda p: p.predicted.retrieval),
        number("full verification, ms", lambda p: p.predicted.target),
        number("autoregressive, ms/token", lambda p: p.predicted.target),
        line("gamma1, gamma2", lambda p: f"{p.predicted.plan.gamma1}, {p.predicted.plan.gamma2}"),
        number("cascade, ms/token", lambda p: p.predicted.cascade),
        number("speedup", lambda p: p.predicted.speedup),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.plan`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
