"""What one process, or one of two ranks, makes of the same runs: `python -m tests.parallel.worker`.

Writes what it saw into a file. Ranks are given different clocks on purpose: none may count.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

import minitri
from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.engine import Engine
from minitri.loading import open_models
from minitri.parallel.ranks import join
from tests.cascades import Rig
from tests.gpu_twins.offload import offloaded as hosted_cache

PROMPTS = [[5 + 7 * i % 300 for i in range(length)] for length in (90, 3, 41)]
NUM_NEW = 12
SETTINGS = {"budget": 32, "chunk_size": 4, "rebuild_stride": 8, "num_recent_tokens": 12}
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {"method": "autoregressive"},
    "naive": {"method": "naive", "gamma1": 3},
    "retrieval": {"method": "retrieval", "gamma2": 3},
    "triforce": {"method": "triforce", "gamma1": 2, "gamma2": 4},
    "tree": {"method": "triforce", "gamma1": 2, "gamma2": 3, "tree": "5"},
    "auto": {"method": "auto"},
}
SAMPLINGS = {"greedy": (0.0, False), "coupled": (0.8, True), "independent": (0.8, False)}
RUNS = [("suffix", name, "coupled") for name in METHODS if name != "autoregressive"]
RUNS += [("model", name, sampling) for name in METHODS for sampling in SAMPLINGS]


def load(folder: Path, name: str, draft: str = "suffix", **options: Any) -> Engine:
    draft = str(folder / draft) if draft != "suffix" else draft
    options = {"dtype": "float32", "device": "cpu", "draft_weights": "same", **options}
    return minitri.load(folder / name, draft=draft, **options)


def load_other(folder: Path, name: str) -> None:
    """Loads a model where this rank finds other files than it should."""
    right = open_models.open_checkpoint
    open_models.open_checkpoint = lambda path: right(folder / name)
    try:
        load(folder, "plain")
    finally:
        open_models.open_checkpoint = right


def texts(engine: Engine, temperature: float, coupled: bool, seed: int, **method: Any) -> Any:
    """Tokens and plans of a batch of three prompts of different lengths."""
    run = engine.generate(
        PROMPTS,
        sampling=SamplingParams(temperature, top_p=0.95 if temperature else 1.0),
        generation=GenerationConfig(NUM_NEW, ignore_eos=True, prefill_chunk=16),
        speculation=SpeculationConfig(coupled=coupled, **SETTINGS, **method),
        seed=seed,
    )
    with run:
        list(run)
    return [row.token_ids for row in run.rows], run.stats.steps_per_plan


def offloaded(engine: Engine) -> list[list[int]]:
    """Greedy texts with the KV cache of a layer in host memory."""
    config, speculation = engine.config, {**SETTINGS, **METHODS["triforce"]}
    full = hosted_cache(1, 3, 200, config=config)
    with torch.inference_mode():
        rig = Rig(
            engine.model, PROMPTS, draft=engine.draft, num_new=NUM_NEW, full=full, **speculation
        )
        return rig.run()


def problem(work: Any) -> str:
    """The one line of an input error."""
    try:
        work()
    except InputError as error:
        return str(error)
    return "none"


def mistakes(folder: Path, engine: Engine, rank: int) -> dict[str, str]:
    """What is said where the ranks, or a model, do not fit."""
    options = SpeculationConfig(method="retrieval")
    return {
        "odd heads": problem(lambda: load(folder, "odd")),
        "other flags": problem(lambda: load(folder, "plain", weights=["auto", "native"][rank])),
        "other prompts": problem(lambda: engine.generate([PROMPTS[rank]], speculation=options)),
        "other seeds": problem(lambda: engine.generate(PROMPTS[0], seed=rank)),
        "int4": problem(lambda: load(folder, "plain", draft_weights="int4")),
        "other shapes": problem(lambda: load_other(folder, ["plain", "tied"][rank])),
        "other files": problem(lambda: load_other(folder, ["plain", "again"][rank])),
        "one GPU": problem(lambda: load(folder, "plain", device="cuda:0")),
        "of rank 0": problem(lambda: join().ask_first(lambda: fail(rank))),
    }


def fail(rank: int) -> None:
    raise InputError(f"rank {rank} cannot read it")


def main(folder: Path) -> None:
    ranks, seen = join(), dict[str, Any]()
    if ranks.rank:
        real = time.perf_counter
        time.perf_counter = lambda: real() ** 2  # a clock that runs faster and faster
    engines = {"suffix": load(folder, "plain"), "model": load(folder, "plain", "tied")}
    plain = engines["model"]
    for draft, name, sampling in RUNS:
        found = texts(engines[draft], *SAMPLINGS[sampling], 0, **METHODS[name])
        seen[f"{name}, {sampling}, {draft}"] = found
    tied = load(folder, "tied")
    seen["tied"] = texts(tied, 0.0, False, 0, **METHODS["retrieval"])
    seen["offloaded"] = offloaded(plain)
    if ranks.count > 1:
        seen["mistakes"] = mistakes(folder, tied, ranks.rank)
    torch.save(seen, folder / f"{ranks.rank} of {ranks.count}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
