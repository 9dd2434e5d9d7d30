"""What the flags leave open of sampling: the model's own recommendation, and a seed that is drawn.

sampling = dataclasses.replace(flags, **model_sampling(args, engine))
seed = seed_of(args, speculation)
"""

import argparse
import dataclasses
import logging
import secrets
from typing import Any

from minitri.engine import Engine
from minitri.loading.prompts import MAX_SEED
from minitri.parallel.ranks import join
from minitri.settings import SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
"""Flags that are None where nothing was given."""


def model_sampling(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """What the model's files say of sampling where no flag does, which is told in a line."""
    plain, wanted = vars(SamplingParams()), vars(engine.sampling_defaults)
    found = {
        name: value
        for name, value in wanted.items()
        if value != plain[name] and getattr(args, name) is None and args.temperature != 0
    }
    if found:
        values = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in found.items())
        line = "sampling as the model's generation_config.json says: %s; --temperature 0 is greedy"
        log.info(line, values)
    return found


def seed_of(args: argparse.Namespace, speculation: SpeculationConfig) -> int:
    """The seed that was given; or one drawn where it matters, which is told."""
    if args.seed is not None or not args.temperature:
        return args.seed or 0
    seed = join().agree(lambda: secrets.randbelow(MAX_SEED + 1))
    if len(speculation.plans) == 1:
        log.info("seed %d; --seed %d repeats this text", seed, seed)
    elif speculation.coupled:
        log.info("seed %d; --seed %d repeats this text, up to rounding", seed, seed)
    else:
        log.info("seed %d; the text follows the clock, too: give --seed if it has to repeat", seed)
    return seed
