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

from minitri.cli.exits import clean_exits, program

with clean_exits():  # for Ctrl-C in the seconds that importing PyTorch takes
    from minitri.cli import arguments
    from minitri.decoding.autotuner import expected_block, expected_tokens
    from minitri.errors import InputError
    from minitri.gpu.placement import GIB, Demand, demand, shortage
    from minitri.loading.checkpoint import open_checkpoint
    from minitri.loading.fetch import committed_path, default_draft
    from minitri.loading.named_models import shape_of, unknown_model
    from minitri.model.config import ModelConfig
    from minitri.roofline import Machine, kv_bytes_per_token, pass_seconds, weights_per_pass
    from minitri.settings import StepPlan


def build_parser() -> arguments.OneLineParser:
    """The flags of the plan."""
    start = "  python -m minitri.plan --model"
    parser = arguments.OneLineParser(
        prog="python -m minitri.plan",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, and how fast that can be.",
        epilog=f"""examples:
{start} llama2-7b-128k --context 124928 --gpu-memory 24
{start} lwm-text-512k --context 524288 --gpu-memory 80 --link-gb-s 50""",
    )
    shown = "(default: %(default)s)"
    machine, speculation = map(parser.add_argument_group, ("machine", "speculation"))
    count, number = (arguments.positive, "N"), (positive_number, "X")
    for flags, name, default, (kind, metavar), text in (
        (parser, "model", "llama2-7b-128k", (str, "NAME|PATH"),
         f"a named model, or a folder or file whose config is read {shown}"),
        (parser, "context", None, count, "tokens, prompt and output (default: all it holds)"),
        (parser, "batch", 1, count, f"sequences {shown}"),
        (parser, "prefill-chunk", 1024, count, f"tokens of the prompt read at a time {shown}"),
        (machine, "gpu-memory", 24, number, f"memory of the GPU in GiB {shown}"),
        (machine, "host-memory", 256, number, f"memory that may be page-locked, in GiB {shown}"),
        (machine, "gpu-gb-s", None, number,
         "GB/s at which the GPU reads its memory (default: by its size, 1000, 2000 or 4000)"),
        (machine, "link-gb-s", 25, number,
         f"GB/s from host memory to the GPU: 25 for PCIe 4.0 x16, 50 for 5.0 {shown}"),
        (speculation, "acceptance", (0.46, 0.92), (arguments.two_rates, "DRAFT,RETRIEVAL"),
         "acceptance rates to expect (default: 0.46,0.92, about the paper's)"),
    ):  # fmt: skip
        flags.add_argument(f"--{name}", default=default, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help=f"of weights and KV cache {shown}",
    )  # fmt: skip
    arguments.add_draft_flag(speculation)
    arguments.add_size_flags(speculation)
    parser.set_defaults(method="triforce", seed=0, quiet=False)
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
    path = Path(name) if Path(name).exists() else committed_path(name)
    if path is not None:
        return open_checkpoint(path).config(Path(name).stem)
    if (shape := shape_of(name)) is None:
        raise unknown_model(name)
    return shape


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
    config: ModelConfig, draft: ModelConfig | None, machine: Machine, *, on_chip: int,
    num_tokens: int, budget: int, plan: StepPlan, acceptance: tuple[float, float],
    batch_size: int = 1, itemsize: int = 2,
) -> Prediction:  # fmt: skip
    """Bytes over bandwidth behind `num_tokens`, if guesses of the drafter and of the retrieval
    level are accepted at these rates."""
    slot = batch_size * kv_bytes_per_token(config, itemsize)
    hosted = (config.num_layers - on_chip) / config.num_layers

    def ms(model: ModelConfig, num_slots: int, hosted: float = 0.0) -> float:
        kv, weights = slot * num_slots, itemsize * weights_per_pass(model)
        options = {"weight_bytes": weights, "kv_bytes": kv, "link_bytes": hosted * kv}
        return 1e3 * pass_seconds(machine, model, **options)

    step = ms(draft, 0) if draft is not None else 0.0
    retrieval, target = ms(config, budget), ms(config, num_tokens, hosted)
    length, num_rounds = expected_block(acceptance[0], plan)
    block = num_rounds * (plan.gamma1 * step + retrieval) + target
    cascade = block / expected_tokens(acceptance[1], length)
    return Prediction(plan, step, retrieval, target, cascade)


@dataclass(frozen=True)
class Placement:
    """So many layers with their KV on the GPU, in bytes and in milliseconds."""

    on_chip: int
    fits: bool
    needs: Demand
    predicted: Prediction

    def as_dict(self) -> dict[str, object]:
        """For the JSON line."""
        milliseconds = dataclasses.asdict(self.predicted) | {"speedup": self.predicted.speedup}
        return {
            "on_chip": self.on_chip, "fits": self.fits,
            "device_bytes": self.needs.on_device(self.on_chip),
            "host_bytes": self.needs.on_host(self.on_chip),
            "parts": self.needs.parts(self.on_chip), "predicted_ms": milliseconds,
        }  # fmt: skip


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    name = default_draft(args.model) if args.draft == "auto" else args.draft
    config, draft = config_of(args.model), None if name in ("ngram", "none") else config_of(name)
    context, itemsize = args.context or config.context_length, 4 if args.dtype == "float32" else 2
    speculation = arguments.speculation_of(args)
    budget = speculation.budget_for(context)
    needs = demand(
        config, draft, speculation, num_tokens=context, prompt_lengths=[context] * args.batch,
        prefill_chunk=args.prefill_chunk, itemsize=itemsize,
    )  # fmt: skip
    gpu_bytes, host_bytes = args.gpu_memory * GIB, args.host_memory * GIB
    nominal = 1000 if args.gpu_memory <= 48 else 2000 if args.gpu_memory <= 80 else 4000
    gpu_gb_s = args.gpu_gb_s or nominal
    machine = Machine(gpu_gb_s * 1e9, gpu_gb_s * 1e9, args.link_gb_s * 1e9)

    def place(on_chip: int) -> Placement:
        fits = needs.on_device(on_chip) <= gpu_bytes and needs.on_host(on_chip) <= host_bytes
        predictions = [
            predict(
                config, draft, machine, on_chip=on_chip, num_tokens=context, budget=budget,
                plan=plan, acceptance=args.acceptance, batch_size=args.batch, itemsize=itemsize,
            )
            for plan in speculation.plans
        ]  # fmt: skip
        return Placement(on_chip, fits, needs, min(predictions, key=lambda each: each.cascade))

    best = needs.most_on_chip(gpu_bytes)
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
        cells = [cell(placement) for placement in placements]
        shown = [f"{value:.2f}" if isinstance(value, float) else value for value in cells]
        return f"{name:34s}" + "".join(f"{value:>18}" for value in shown)

    def part(name: str) -> str:
        return line(f"  {name}, GiB", lambda place: place.needs.parts(place.on_chip)[name] / GIB)

    needs = placements[0].needs
    L, where = needs.num_layers, {needs.num_layers: "all"}
    return "\n".join([
        line("KV cache on the GPU", lambda p: where.get(p.on_chip, f"{p.on_chip} of {L} layers")),
        *map(part, needs.parts(0)),
        line("on the GPU, GiB", lambda p: needs.on_device(p.on_chip) / GIB),
        line("in host memory, GiB", lambda p: needs.on_host(p.on_chip) / GIB),
        line("fits", lambda p: "yes" if p.fits else "no"),
        line("draft step, ms", lambda p: p.predicted.draft),
        line("retrieval verification, ms", lambda p: p.predicted.retrieval),
        line("full verification, ms", lambda p: p.predicted.target),
        line("autoregressive, ms/token", lambda p: p.predicted.target),
        line("gamma1, gamma2", lambda p: f"{p.predicted.plan.gamma1}, {p.predicted.plan.gamma2}"),
        line("cascade, ms/token", lambda p: p.predicted.cascade),
        line("speedup", lambda p: p.predicted.speedup),
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.plan`."""
    with program(build_parser(), argv) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
