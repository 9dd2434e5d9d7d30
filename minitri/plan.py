"""What of a model fits where, and how fast it can be: `python -m minitri.plan`, loading nothing.

    python -m minitri.plan --model llama2-7b-128k --context 124928 --gpu-memory 24

prints, for several placements of the KV cache, the bytes on the device and in host memory, whether
they fit, and the milliseconds per token to expect, autoregressive and with the cascade. Gammas that
are not given are the fastest ones, if a pass over more tokens takes no longer. Bytes come from
`gpu/placement.py`, with which an engine boots, times from `roofline.py`. The last line is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import functools
    import json
    import sys
    from dataclasses import dataclass
    from pathlib import Path
    from typing import Any

    from minitri.cli import arguments
    from minitri.decoding.autotuner import expected_block, expected_tokens
    from minitri.errors import InputError, shorten
    from minitri.gpu.placement import CONTEXT, GIB, demand, shortage
    from minitri.loading.checkpoint import open_checkpoint
    from minitri.loading.fetch import committed_path, default_draft, split_draft
    from minitri.loading.named_models import shape_of, unknown_model
    from minitri.model.config import ModelConfig
    from minitri.roofline import (
        Machine,
        four_bit_bytes,
        kv_bytes_per_token,
        pass_seconds,
        weights_per_pass,
    )
    from minitri.settings import StepPlan


def build_parser() -> arguments.OneLineParser:
    """The flags of the plan."""
    parser = arguments.OneLineParser(
        "plan",
        "--model llama2-7b-128k --context 124928 --gpu-memory 24",
        "--model lwm-text-512k --context 524288 --gpu-memory 80 --link-gb-s 50",
        description="Says what of a model and its KV cache fits on a GPU and what goes to host "
        "memory, and how fast that can be.",
    )
    add, count, number = parser.add_argument, arguments.positive, positive_number
    text = "a named model, or a folder or file whose config is read"
    add("--model", metavar="NAME|PATH", default="llama2-7b-128k", help=text)
    text = "tokens, prompt and output (default: all it holds)"
    add("--context", type=count, metavar="N", help=text)
    add("--batch", type=arguments.whole(1, 65536), metavar="N", default=1, help="sequences")
    text = "tokens of the prompt read at a time"
    add("--prefill-chunk", type=count, metavar="N", default=1024, help=text)
    text, dtypes = "of weights and KV cache", ("bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, default="bfloat16", help=text)
    group = parser.add_argument_group("machine")
    for name, default, text in (
        ("gpu-memory", 24, "memory of the GPU in GiB"),
        ("host-memory", 256, "memory that may be page-locked, in GiB"),
        ("gpu-gb-s", None, "GB/s at which the GPU reads its memory (default: by its size, 1000, "
         "2000 or 4000)"),
        ("link-gb-s", 25, "GB/s from host memory to the GPU: 25 for PCIe 4.0 x16, 50 for 5.0"),
    ):  # fmt: skip
        group.add_argument(f"--{name}", type=number, metavar="X", default=default, help=text)
    group = parser.add_argument_group("speculation")
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
        options: dict[str, Any] = {
            "weight_bytes": weights,
            "kv_bytes": kv,
            "link_bytes": hosted * kv,
        }
        return 1e3 * pass_seconds(machine, model, **options)

    step = ms(draft, 0) if draft is not None else 0.0
    retrieval, target = ms(config, budget), ms(config, num_tokens, hosted)
    per_round = expected_tokens(acceptance[0], plan.gamma1)
    length, num_rounds = expected_block(per_round, plan)
    block = num_rounds * (plan.gamma1 * step + retrieval) + target
    return Prediction(plan, step, retrieval, target, block / expected_tokens(acceptance[1], length))


def draft_config(args: argparse.Namespace) -> ModelConfig | None:
    """The shape of the drafter; None if it is no model."""
    name = default_draft(args.model) if args.draft == "auto" else args.draft
    _, model = split_draft(name)
    return None if model in ("", "none") else config_of(model)


def run_command(args: argparse.Namespace) -> int:
    """Prints the plan. Raises `InputError` with what is missing if no placement fits."""
    config, draft = config_of(args.model), draft_config(args)
    context, itemsize = args.context or config.context_length, 4 if args.dtype == "float32" else 2
    speculation = arguments.speculation_of(args)
    budget = speculation.budget_for(context)
    demand_of = functools.partial(
        demand, config, draft, speculation, num_tokens=context, prefill_chunk=args.prefill_chunk,
        itemsize=itemsize,
    )  # fmt: skip
    needs = demand_of(prompt_lengths=[context] * args.batch)
    gpu_bytes, host_bytes = args.gpu_memory * GIB - CONTEXT, args.host_memory * GIB
    by_size = 1000 if args.gpu_memory <= 48 else 2000 if args.gpu_memory <= 80 else 4000
    gpu_gb_s = args.gpu_gb_s or by_size
    machine = Machine(gpu_gb_s * 1e9, gpu_gb_s * 1e9, args.link_gb_s * 1e9)

    def rows_that_fit(on_chip: int) -> int:
        """Sequences of this context at a time, up to a thousand."""
        for num_rows in range(1, 1001):
            more = demand_of(prompt_lengths=[context] * num_rows)
            if more.on_device(on_chip) > gpu_bytes or more.on_host(on_chip) > host_bytes:
                return num_rows - 1
        return 1000

    def place(on_chip: int) -> dict[str, Any]:
        predictions = [
            predict(
                config, draft, machine, on_chip=on_chip, num_tokens=context, budget=budget,
                plan=plan, acceptance=args.acceptance, batch_size=args.batch, itemsize=itemsize,
            )
            for plan in speculation.plans
        ]  # fmt: skip
        fastest = min(predictions, key=lambda prediction: prediction.cascade)
        on_device, on_host = needs.on_device(on_chip), needs.on_host(on_chip)
        return {
            "on_chip": on_chip, "fits": on_device <= gpu_bytes and on_host <= host_bytes,
            "rows_that_fit": rows_that_fit(on_chip),
            "device_bytes": on_device, "host_bytes": on_host, "parts": needs.parts(on_chip),
            "predicted_ms": dataclasses.asdict(fastest) | {"speedup": fastest.speedup},
        }  # fmt: skip

    best = needs.most_on_chip(gpu_bytes)
    placements = [place(n) for n in sorted({config.num_layers, best or 0, 0}, reverse=True)]
    print(
        f"{config.name}, {context} tokens, batch {args.batch}, {args.dtype}, drafter "
        f"{draft.name if draft else 'suffix'}, budget {budget}; a GPU of {args.gpu_memory:g} GiB "
        f"at {gpu_gb_s:g} GB/s, {args.host_memory:g} GiB of host memory over {args.link_gb_s:g} "
        "GB/s"
    )
    print(table(placements, config.num_layers))
    copy_bytes = four_bit_bytes(config)
    print(f"On a CPU guesses take a copy in 4 bits, {copy_bytes / GIB:.2f} GiB (--draft-weights).")
    result = {
        "model": config.name, "context": context, "on_chip": best, "placements": placements,
        "draft_weights_bytes": copy_bytes,
    }  # fmt: skip
    print(json.dumps(result))
    if (missing := shortage(needs, gpu_bytes, host_bytes, config.name)) is not None:
        raise InputError(missing)
    return 0


def table(placements: list[dict[str, Any]], L: int) -> str:
    """Placements of L layers as columns."""
    columns = []
    for placement in placements:
        on_chip, ms = placement["on_chip"], placement["predicted_ms"]
        columns.append({
            "KV cache on the GPU": "all" if on_chip == L else f"{on_chip} of {L} layers",
            **{f"  {name}, GiB": size / GIB for name, size in placement["parts"].items()},
            "on the GPU, GiB": placement["device_bytes"] / GIB,
            "in host memory, GiB": placement["host_bytes"] / GIB,
            "fits": "yes" if placement["fits"] else "no",
            "sequences that fit": placement["rows_that_fit"],
            "draft step, ms": ms["draft"],
            "retrieval verification, ms": ms["retrieval"],
            "full verification, ms": ms["target"],
            "autoregressive, ms/token": ms["target"],
            "gamma1, gamma2": "{gamma1}, {gamma2}".format(**ms["plan"]),
            "cascade, ms/token": ms["cascade"],
            "speedup": ms["speedup"],
        })  # fmt: skip
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
