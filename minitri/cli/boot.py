"""From flags to an engine that is ready: weights, threads, sampling, seed, a KV snapshot.

engine, [prompt] = load_engine(args, draft, [(text, max_tokens)], num_new=256)
sampling = dataclasses.replace(flags, **model_sampling(args, engine))
seed = seed_of(args, speculation)
"""

import argparse
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minitri.cli.arguments import Flags, model_of
from minitri.cli.inputs import encode
from minitri.config import ModelConfig
from minitri.engine import Engine
from minitri.errors import InputError, shorten
from minitri.loader import load
from minitri.loading.prompt_ids import MAX_SEED, check_prompt
from minitri.loading.tokenizer import Tokenizer
from minitri.parallel.ranks import join
from minitri.settings import SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")


def boot(
    args: argparse.Namespace, draft: str, check: Callable[[Tokenizer, ModelConfig], None]
) -> Engine:
    """Boots the engine that the flags ask for, with `check` before the weights are read."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    engine = load(**model_of(args), draft=draft, before_weights=check)
    if args.bitwise and (args.tree or not engine.model.execution.is_row_invariant):
        what = f"{engine.config.name} on {engine.model.device}" if not args.tree else "--tree"
        problem = f"--bitwise needs the compiled kernels and chains of guesses, not {what}"
        raise InputError(f"{problem}; run on a CPU with a C++ compiler, or leave it out")
    return engine


def load_engine(
    args: argparse.Namespace, draft: str, texts: Sequence[tuple[str, int | None]], *, num_new: int
) -> tuple[Engine, list[list[int]]]:
    """Boots the engine that the flags ask for; its prompts are checked before it reads weights.

    Each text goes with the number of tokens that are kept. Raises `InputError`.
    """
    prompts: list[list[int]] = []

    def check(tokenizer: Tokenizer, config: ModelConfig) -> None:
        for text, max_tokens in texts:
            prompts.append(encode(text, tokenizer, config, max_tokens, num_new, args))
            check_prompt(prompts[-1], config, num_new)

    return boot(args, draft, check), prompts


def model_sampling(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """What the model's files say of sampling where no flag does, which is told in a line."""
    plain = SamplingParams()
    found = {
        name: value
        for name, value in vars(engine.sampling_defaults).items()
        if value != getattr(plain, name) and getattr(args, name) is None and args.temperature != 0
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
    seed = join().ask_first(lambda: secrets.randbelow(MAX_SEED + 1))
    repeats = f"--seed {seed} repeats this text"
    if len(speculation.plans) > 1:
        repeats += ", up to rounding"
        if not speculation.coupled:
            repeats = "the text follows the clock, too: give --seed if it has to repeat"
    log.info("seed %d; %s", seed, repeats)
    return seed


def add_kv_flags(flags: Flags) -> None:
    """The flags of a KV snapshot: K and V of a prompt from a file, and into one."""
    text = "start after what the prompt has in common with the text whose KV cache FILE holds"
    flags.add_argument("--load-kv", metavar="FILE", help=text)
    text = "in the end write the KV cache to FILE (60 GB for 7B at 120,000 tokens, 0.19 GB for "
    text += "the default model at 8,000)"
    flags.add_argument("--save-kv", metavar="FILE", help=text)


def check_kv_flags(args: argparse.Namespace) -> None:
    """Raises `InputError`, before minutes of work, for files that cannot be read or written."""
    if args.load_kv is not None and not Path(args.load_kv).is_file():
        raise InputError(f"no KV snapshot {shorten(args.load_kv)}; save one with --save-kv")
    if args.save_kv is not None and not os.access(Path(args.save_kv).absolute().parent, os.W_OK):
        problem = f"cannot write {shorten(args.save_kv)}: its folder is missing or read-only"
        raise InputError(f"{problem}; name another")


def load_kv(args: argparse.Namespace, engine: Engine) -> None:
    """Does what --load-kv says."""
    if args.load_kv is not None:
        log.info("KV snapshot: %d tokens", engine.load_kv(args.load_kv))


def save_kv(args: argparse.Namespace, engine: Engine, num_cached: int) -> None:
    """Does what --save-kv says. `num_cached` tokens of the prompt were not read."""
    if args.load_kv is not None and not num_cached:
        log.warning("--load-kv was of no use: the prompt begins unlike the text of the snapshot")
    if args.save_kv is not None:
        num_tokens = engine.save_kv(args.save_kv)
        size = Path(args.save_kv).stat().st_size / 1e6
        log.info("saved the KV cache of %d tokens, %.0f MB", num_tokens, size)
