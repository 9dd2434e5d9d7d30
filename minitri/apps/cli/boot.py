"""From flags to an engine that is ready: weights, threads, sampling, seed, a KV snapshot."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minitri import InputError, ModelConfig, SamplingParams
from minitri.apps.cli.arguments import model_of, taken
from minitri.apps.cli.exits import clean_imports
from minitri.apps.cli.inputs import encode
from minitri.apps.cli.report import outline, where
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.core.offload.placement import GIB
from minitri.devices.parallel.ranks import join
from minitri.text.prompt_ids import draw_seed
from minitri.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minitri import Engine, Generation


def boot(
    args: argparse.Namespace, check: Callable[[Tokenizer, ModelConfig], None] | None = None
) -> "Engine":
    """Boots the engine of the flags. What has to fit the model is checked before weights are read.
    Raises `InputError`."""
    sampling = taken(SamplingParams, args)
    with clean_imports():  # the only place where programs import PyTorch: no flag is wrong any more
        import torch

        from minitri.loader import load
        from minitri.text.filters import text_filters

    def before_weights(tokenizer: Tokenizer, config: ModelConfig) -> None:
        text_filters(sampling, [], tokenizer, config)
        if check is not None:
            check(tokenizer, config)

    if args.threads is not None:  # more than there are would wait for one another
        allowed = getattr(os, "sched_getaffinity", lambda _: ())(0)  # on Linux, as in a container
        most = len(allowed) or os.cpu_count() or 1
        if args.threads > most:
            log.warning("--threads %d: this machine has %d cores; using those", args.threads, most)
        torch.set_num_threads(min(args.threads, most))
    engine = load(**model_of(args), before_weights=before_weights)
    if args.bitwise and (args.tree or not engine.model.execution.is_row_invariant):
        raise InputError(
            "--bitwise needs the compiled kernels (a CPU with a C++ compiler) and no --tree; leave "
            "it out"
        )
    if (file := vars(args).get("load_kv")) is not None:
        log.debug("KV snapshot: %d tokens", engine.load_kv(file))
    if (url := vars(args).get("kv_store")) is not None:
        engine.open_kv_store(url, int(args.kv_store_size * GIB))
    return engine


def load_engine(args: argparse.Namespace, texts: Sequence[str]) -> "tuple[Engine, list[list[int]]]":
    """Boots the engine of the flags; gives also the token ids of prompts."""
    prompts = []

    def check(tokenizer: Tokenizer, config: ModelConfig) -> None:
        for text in texts:
            prompts.append(encode(text, tokenizer, config, args.max_new_tokens, args))

    return boot(args, check), prompts


def sampling_of(
    args: argparse.Namespace,
    engine: "Engine",
    *work: str,
    otherwise: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> tuple[SamplingParams, int]:
    """Sampling by the flags, or as the model's files say, or else `otherwise`; and the seed, drawn
    if need be. Logs the line in front of all work."""
    plain = SamplingParams()
    advised = otherwise if engine.sampling_defaults == plain else engine.sampling_defaults
    sampling = taken(SamplingParams, args, plain if args.temperature == 0 else advised)
    shown = {name: it for name, it in vars(sampling).items() if it != getattr(plain, name)}
    seed: int = args.seed or 0
    if sampling.temperature:
        seed = shown["seed"] = join().ask_first(draw_seed) if args.seed is None else seed
    how = ", ".join(f"{name} {shorten(value, 80)}" for name, value in shown.items()) or "greedy"
    on = "{}, {dtype} on {device}".format(engine.config.name, **where(engine.model))
    log.info("%s", "; ".join((on, *work, how)))
    return sampling, seed


def check_save_kv(args: argparse.Namespace) -> None:
    """Raises `InputError`, before minutes of work, for a file that cannot be written."""
    if args.save_kv is not None:
        path = Path(args.save_kv).absolute()
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise InputError(f"--save-kv: cannot write {shorten(args.save_kv)}; name another file")


def conclude(args: argparse.Namespace, engine: "Engine", run: "Generation") -> None:
    """Closes a run: its statistics go to the log; does what --save-kv says."""
    run.close()
    log.info(outline(run))
    if args.save_kv is not None:
        log.info("saved the KV cache of %d tokens", engine.save_kv(args.save_kv))
