"""From flags to an engine that is ready: weights, threads, sampling, seed, a KV snapshot."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import minitri
from minitri import GenerationConfig, InputError, SamplingParams
from minitri.apps.cli import exits, inputs, report
from minitri.apps.cli.arguments import model_of, speculation_of, taken
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.core.offload.placement import GIB
from minitri.core.stats import num_common
from minitri.devices.parallel.ranks import join
from minitri.files.named_models import DEFAULT_MODEL, LARGER
from minitri.text.prompt_ids import draw_seed


def load_engine(
    args: Namespace, *texts: str, usual_tokens: int | None = None
) -> "tuple[minitri.Engine, list[list[int]]]":
    """Loads the engine that flags name; returns it with the token ids of each of `texts`, cut to
    --max-prompt-tokens, or else to `usual_tokens`. Raises `InputError`."""
    opened = open_engine(args)
    prompts = [inputs.encode(text, opened, args, usual_tokens=usual_tokens) for text in texts]
    return load_weights(args, opened), prompts


def open_engine(args: Namespace) -> "minitri.loader.OpenEngine":
    """Opens models by flags, without weights; checks sampling, --save-kv. Raises `InputError`."""
    exits.import_pytorch()  # takes seconds
    from minitri.files.snapshots import check_place
    from minitri.loader import OpenEngine
    from minitri.text.prepare import text_filters

    if (file := vars(args).get("save_kv")) is not None:  # before minutes of work
        with explain(f"--save-kv: cannot write {shorten(file)}", "name another file"):
            check_place(Path(file))
        if Path(file).exists():
            log.info(f"--save-kv: the KV snapshot in {shorten(file)} will be replaced")
    opened = OpenEngine(**model_of(args))
    # Checks words and grammar.
    text_filters(taken(SamplingParams, args), [], opened.tokenizer, opened.config)
    return opened


def load_weights(args: Namespace, opened: "minitri.loader.OpenEngine") -> "minitri.Engine":
    """Loads the weights; applies --threads, --bitwise and --kv-store. Raises `InputError`."""
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    engine = opened.load()
    if args.bitwise and (args.tree or not engine.model.execution.is_row_invariant):
        raise InputError("--bitwise needs kernels (a C++ compiler) and no --tree; leave it out")
    if (folder := vars(args).get("kv_store")) is not None:
        engine.open_kv_store(folder, int(args.kv_store_size * GIB))
    return engine


def suggest_larger(args: Namespace) -> None:
    """Logs which larger model fits into memory, if --model is the default one, which is small."""
    from minitri.core.memory import free_host_bytes  # with PyTorch

    fits = [larger for least, larger in LARGER.items() if least < free_host_bytes()]
    if fits and args.model == DEFAULT_MODEL:
        log.info(f"{args.model} is small for documents; --model {fits[0]} fits here")


def sampling_of(
    args: Namespace, engine: "minitri.Engine", *notes: str
) -> tuple[SamplingParams, int]:
    """Sampling settings by the flags, else the engine's defaults, and the seed by --seed.
    Without --seed it is drawn, or 0 at temperature 0. Logs model, `notes` and sampling."""
    sampling = taken(SamplingParams, args, engine.sampling_defaults)
    is_drawn = sampling.temperature and args.seed is None
    seed: int = join().ask_first(draw_seed) if is_drawn else args.seed or 0
    name = f"{engine.config.name}, {engine.model.num_bytes / 1e6:.0f} MB of weights"
    model = "{}, {dtype} on {device}".format(name, **report.where(engine.model))
    log.info("; ".join((model, *notes, report.how_sampled(sampling, seed))))
    return sampling, seed


@contextlib.contextmanager
def start_run(
    args: Namespace, engine: "minitri.Engine", requests: Sequence[minitri.Request]
) -> "Iterator[minitri.Generation]":
    """Context with a run over requests, which may reuse K and V of the --load-kv file. At the end
    logs statistics and does --save-kv. Raises `InputError`."""
    hottest = max(request.sampling.temperature for request in requests)
    if args.load_kv is not None and not engine.held_tokens:
        engine.load_kv(args.load_kv)
    with engine.stream(
        requests,
        batch_size=args.batch_size,
        generation=taken(GenerationConfig, args),  # only fields of runs count here
        speculation=speculation_of(args, hottest),  # timed if greedy and without --seed
    ) as run:
        if held := engine.held_tokens:  # of --load-kv: all others are the run's
            used = max(num_common(held, state.prompt_ids) for state in run.rows)
            log.info(f"--load-kv: prompts begin with up to {used} of its {len(held)} tokens")
        yield run
    log.info(report.outline(run))
    if args.save_kv is not None:
        log.info("saved the KV cache of %d tokens", engine.save_kv(args.save_kv))
