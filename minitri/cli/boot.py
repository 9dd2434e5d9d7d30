"""From flags to an engine that is ready: weights, threads, sampling, seed, a KV snapshot."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitri import InputError, ModelConfig, SamplingParams
from minitri.cli.arguments import model_of, taken
from minitri.cli.exits import clean_imports
from minitri.cli.inputs import encode
from minitri.cli.report import outline, where
from minitri.errors import shorten
from minitri.loading.prompt_ids import draw_seed
from minitri.loading.tokenizer import Tokenizer
from minitri.log import log
from minitri.parallel.ranks import join

if TYPE_CHECKING:
    from minitri import Engine, Generation


def boot(
    args: argparse.Namespace, prepare: Callable[[Tokenizer, ModelConfig], Any] = lambda *_: None
) -> "tuple[Engine, Any]":
    """Boots the engine of the flags; gives also what `prepare` made. Raises `InputError`."""
    with clean_imports():  # the only place where programs import PyTorch: no flag is wrong any more
        import torch

        from minitri.loader import load
    if args.threads is not None:
        torch.set_num_threads(_at_most_the_cores(args.threads))
    made = []
    engine = load(**model_of(args), before_weights=lambda *files: made.append(prepare(*files)))
    if args.bitwise and (args.tree or not engine.model.execution.is_row_invariant):
        needs = "the compiled kernels (a CPU with a C++ compiler) and no --tree"
        raise InputError(f"--bitwise needs {needs}; leave it out")
    if (file := vars(args).get("load_kv")) is not None:
        log.debug("KV snapshot: %d tokens", engine.load_kv(file))
    return engine, made[0]


def _at_most_the_cores(num_threads: int) -> int:
    """More would wait for one another."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux, where a container may have fewer
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if num_threads > num_cores:
        log.warning("--threads %d: this machine has %d cores; using those", num_threads, num_cores)
    return min(num_threads, num_cores)


def load_engine(args: argparse.Namespace, texts: Sequence[str]) -> "tuple[Engine, list[list[int]]]":
    """Boots the engine that the flags ask for; its prompts are checked before it reads weights."""

    def prompts(tokenizer: Tokenizer, config: ModelConfig) -> list[list[int]]:
        return [encode(text, tokenizer, config, args.max_new_tokens, args) for text in texts]

    return boot(args, prompts)


def sampling_of(
    args: argparse.Namespace,
    engine: "Engine",
    work: str = "",
    otherwise: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> tuple[SamplingParams, int]:
    """Sampling by the flags, or as the model's files say, or else `otherwise`; and the seed, drawn
    if need be. Logs the line in front of all work, of which `work` is a part."""
    sampling = taken(SamplingParams, args)
    is_known = engine.sampling_defaults != SamplingParams()
    found = {
        name: value
        for name, value in vars(engine.sampling_defaults if is_known else otherwise).items()
        if getattr(args, name) is None and value != getattr(sampling, name)
    }
    if args.temperature != 0 and found:
        source = " as the model's generation_config.json says" if is_known else ""
        log.debug("sampling%s: %s; --temperature 0 is greedy", source, found)
        sampling = dataclasses.replace(sampling, **found)
    seed = args.seed
    if seed is None and sampling.temperature:
        seed = join().ask_first(draw_seed)
        log.debug("the text may follow the clock, too: --seed makes it repeatable")
    plain = vars(SamplingParams())
    chosen = [f"{it} {to}" for it, to in vars(sampling).items() if to != plain[it]] or ["greedy"]
    facts = where(engine.model)
    work = "; ".join(filter(None, [work, ", ".join(chosen)]))
    work += f", seed {seed}" if sampling.temperature else ""
    log.info("%s, %s on %s; %s", engine.config.name, facts["dtype"], facts["device"], work)
    return sampling, seed or 0


def check_save_kv(args: argparse.Namespace) -> None:
    """Raises `InputError`, before minutes of work, for a file that cannot be written."""
    if args.save_kv is not None and Path(args.save_kv).is_dir():
        raise InputError(f"--save-kv {shorten(args.save_kv)} is a folder; name a file")
    if args.save_kv is not None and not os.access(Path(args.save_kv).absolute().parent, os.W_OK):
        raise InputError(f"--save-kv: cannot write {shorten(args.save_kv)}; name another file")


def conclude(args: argparse.Namespace, engine: "Engine", run: "Generation") -> None:
    """Closes a run: its statistics go to the log; does what --save-kv says."""
    run.close()
    log.info(outline(run))
    if args.save_kv is not None:
        log.info("saved the KV cache of %d tokens", engine.save_kv(args.save_kv))
