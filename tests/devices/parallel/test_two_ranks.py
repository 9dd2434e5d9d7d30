"""A model split over two processes (gloo on a CPU) writes the texts of one.

Two ranks and a process alone make the same runs (`main`, below), in float32. Ranks are given
different clocks on purpose: none may count.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

import minitri
from minitri import GenerationConfig, Grammar, InputError, SamplingParams, SpeculationConfig
from minitri.devices.parallel.ranks import join
from minitri.engine import Engine
from minitri.files import open_models
from tests.conftest import write_hf_folder
from tests.core.rigs import Rig
from tests.devices.gpu_twins.offload import offloaded as hosted_cache

PROMPTS = [[5 + 7 * i % 300 for i in range(length)] for length in (90, 3, 41)]
NUM_NEW = 12
SETTINGS = {"budget": 32, "chunk_size": 4, "rebuild_stride": 8, "num_recent_tokens": 12}
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "naive": {"gamma1": 3},
    "retrieval": {"gamma2": 3},
    "triforce": {"gamma1": 2, "gamma2": 4},
    "tree": {"method": "triforce", "gamma1": 2, "gamma2": 3, "tree": "5"},
    "auto": {},
}
METHODS = {name: {"method": name, **options} for name, options in METHODS.items()}
SAMPLINGS = {"greedy": (0.0, False), "coupled": (0.8, True), "independent": (0.8, False)}
SAMPLINGS["shaped"] = (0.9, False)
SHAPED = {"presence_penalty": 0.7, "repetition_penalty": 1.3, "grammar": Grammar("json_object")}
RUNS = [("suffix", name, "coupled") for name in METHODS if name != "autoregressive"]
RUNS += [("tied", name, sampling) for name in METHODS for sampling in SAMPLINGS]
"""Drafter, method, sampling."""


def start(program: list[str], num_ranks: int = 1) -> list[subprocess.Popen]:
    """A process per rank, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    for rank in map(str, range(num_ranks)):
        env = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": PIPE, "stderr": PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, "-m", *program], env=env, **pipes))
    return ranks


def finish(ranks: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Exit codes and messages of all."""
    messages = [rank.communicate(timeout=300)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], messages


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Four random models. A vocabulary of 321 tokens is no multiple of two."""
    folder = tmp_path_factory.mktemp("split")
    write_hf_folder(folder / "plain", vocab_size=321, attention_bias=True)
    write_hf_folder(folder / "again", seed=2, vocab_size=321, attention_bias=True)
    write_hf_folder(folder / "tied", seed=1, vocab_size=321, tie_word_embeddings=True)
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    write_hf_folder(folder / "odd", **odd)
    return folder


@pytest.fixture(scope="module")
def seen(models) -> list[dict]:
    """What a process alone saw, then rank 0 and rank 1."""
    program = ["tests.devices.parallel.test_two_ranks", str(models)]
    codes, messages = finish(start(program) + start(program, 2))
    assert codes == [0, 0, 0], messages
    names = ("0 of 1", "0 of 2", "1 of 2")
    return [torch.load(models / f"{name}.pt", weights_only=True) for name in names]


@pytest.mark.parametrize("case", [*map(", ".join, RUNS), "tied"])
def test_two_ranks_write_the_text_of_one_process(seen, case):
    """With every method and drafter, in batches."""
    (alone, plans), first, second = (them[case] for them in seen)
    assert first[0] == alone
    assert first == second
    assert plans if "auto" in case else plans == first[1]


def test_the_kv_cache_of_a_rank_may_be_in_host_memory(seen):
    alone, first, second = (them["offloaded"] for them in seen)
    assert alone == first == second == seen[1]["tied, triforce, greedy"][0]


def test_what_does_not_fit_is_one_line_on_all_ranks(seen):
    first, second = (them["mistakes"] for them in seen[1:])
    assert first == second
    for part, line in first:
        assert part in line
        assert "\n" not in line


def generate(models: Path, *flags: str) -> list[str]:
    model = str(models / "plain")
    return ["minitri.generate", "--model", model, "--device", "cpu", "--ignore-eos", *flags]


@pytest.mark.slow
def test_torchrun_shows_one_text_of_one_prompt_from_standard_input(models):
    program = generate(models, "--prompt-file", "-", "--max-new-tokens", "8", "--method", "naive")
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m"]
    options = {"input": "She had been forced", "capture_output": True, "text": True}
    run, alone = (
        subprocess.run([sys.executable, "-m", *before, *program], timeout=120, **options)
        for before in (torchrun, [])
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == alone.stdout
    assert run.stderr.count("tokens/s") == 1  # the summary, once


@pytest.mark.parametrize(
    ("how", "which"), [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGINT, 1)]
)
def test_when_one_rank_ends_all_end_with_one_line(models, how, which):
    """A killed rank is noticed by the other. If texts end before it, another run is made."""
    flags = ("--quiet", "--max-new-tokens", "450", "--method", "autoregressive", "--prompt", "She")
    codes = [0, 0]
    for _ in range(5):
        if codes == [0, 0]:
            ranks = start(generate(models, *flags), 2)
            assert ranks[0].stdout.read(1)  # it has begun
            ranks[which].send_signal(how)
            codes, messages = finish(ranks)
    if how == signal.SIGKILL:
        assert codes[1 - which] == 2
        assert "".join(messages).count("minitri: ") == 1
        assert which == 0 or messages[0].count("\n") == 1  # rank 0 keeps PyTorch's store here
        assert f"rank {1 - which} has lost the other ranks" in "".join(messages)
    else:
        assert codes == [130, 130]
        assert messages == ["", ""]


def test_a_bad_flag_is_told_once(models):
    codes, messages = finish(start(generate(models, "--gamma1", "x"), 2))
    assert codes == [2, 2]
    assert "".join(messages).count("\n") == 1


def load(folder: Path, name: str, draft: str = "suffix", **options: Any) -> Engine:
    draft = str(folder / draft) if draft != "suffix" else draft
    options = {"dtype": "float32", "device": "cpu", "draft_weights": "same", **options}
    return minitri.load(folder / name, draft=draft, **options)


def texts(engine: Engine, temperature: float, coupled: bool, **method: Any) -> Any:
    """Tokens and plans of a batch of three prompts of different lengths."""
    shaped = SHAPED if temperature == 0.9 else {}
    sampling = SamplingParams(temperature, top_p=0.95 if temperature else 1.0, **shaped)
    generation = GenerationConfig(NUM_NEW, ignore_eos=True, prefill_chunk=16)
    speculation = SpeculationConfig(coupled=coupled, **SETTINGS, **method)
    options = {"sampling": sampling, "generation": generation, "speculation": speculation}
    with engine.generate(PROMPTS, seed=0, **options) as run:
        list(run)
    return [row.token_ids for row in run.rows], run.stats.steps_per_plan


def offloaded(engine: Engine) -> list[list[int]]:
    """Greedy texts with the KV cache of a layer in host memory."""
    full = hosted_cache(1, 3, 200, config=engine.config)
    options = {"full": full, "num_new": NUM_NEW, **SETTINGS, **METHODS["triforce"]}
    with torch.inference_mode():
        return Rig(engine.model, PROMPTS, draft=engine.models.draft, **options).run()


def mistakes(folder: Path, engine: Engine, rank: int) -> list[tuple[str, str]]:
    """What is to be said, and is, where the ranks, or a model, do not fit."""

    def fail() -> None:
        raise InputError(f"rank {rank} cannot read it")

    def load_other(name: str) -> None:
        """Where this rank finds other files than it should."""
        right = open_models.open_checkpoint
        open_models.open_checkpoint = lambda _: right(folder / name)
        try:
            load(folder, "plain")
        finally:
            open_models.open_checkpoint = right

    weights = ["auto", "native"][rank]
    attempts = [
        ("split over 2 ranks", lambda: load(folder, "odd")),
        ("different models", lambda: load(folder, "plain", weights=weights)),
        ("different model files", lambda: load_other(["plain", "tied"][rank])),
        ("different model files", lambda: load_other(["plain", "again"][rank])),
        ("different prompts", lambda: engine.generate([PROMPTS[rank]])),
        ("seeds or settings", lambda: engine.generate(PROMPTS[0], seed=rank)),
        ("draft_weights=int4", lambda: load(folder, "plain", draft_weights="int4")),
        ("one GPU for 2 ranks", lambda: load(folder, "plain", device="cuda:0")),
        ("rank 0 cannot read it", lambda: join().ask_first(fail)),
    ]
    told = []
    for part, attempt in attempts:
        with pytest.raises(InputError) as caught:
            attempt()
        told.append((part, str(caught.value)))
    return told


def main(folder: Path) -> None:
    """Writes into a file what this rank sees."""
    ranks, seen = join(), dict[str, Any]()
    if ranks.rank:
        real = time.perf_counter
        time.perf_counter = lambda: real() ** 2  # a clock that runs faster and faster
    engines = {draft: load(folder, "plain", draft) for draft in ("suffix", "tied")}
    for draft, name, sampling in RUNS:
        found = texts(engines[draft], *SAMPLINGS[sampling], **METHODS[name])
        seen[f"{draft}, {name}, {sampling}"] = found
    tied = load(folder, "tied")
    seen["tied"] = texts(tied, 0.0, False, **METHODS["retrieval"])
    seen["offloaded"] = offloaded(engines["tied"])
    if ranks.count > 1:
        seen["mistakes"] = mistakes(folder, tied, ranks.rank)
    torch.save(seen, folder / f"{ranks.rank} of {ranks.count}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
