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
from unittest.mock import Mock, patch

import pytest
import torch

import minitri
from minitri import Grammar, InputError
from minitri.core.settings import METHODS
from minitri.devices.parallel.ranks import join
from minitri.engine import Engine
from minitri.files import open_models
from tests.conftest import settings_of, texts_of, write_hf_folder
from tests.core.rigs import GREEDY, WARM

PROMPTS = [[5 + 7 * i % 300 for i in range(length)] for length in (90, 3, 41)]
SMALL = {"budget": 32, "chunk_size": 4, "rebuild_stride": 8, "num_recent_tokens": 12}
TREE = {"gamma1": 2, "gamma2": 3, "tree": "5"}
SHAPED = minitri.SamplingParams(
    0.9, presence_penalty=0.7, repetition_penalty=1.3, grammar=Grammar("json_object")
)
RUNS: dict[str, dict[str, Any]] = {
    f"{method}, {kind}": settings_of(method, 12, sampling, coupled=coupled, **SMALL)
    for method in METHODS
    for kind, sampling, coupled in (("greedy", GREEDY, False), ("coupled", WARM, True))
}
RUNS["triforce, shaped"] = settings_of("triforce", 12, SHAPED, gamma1=2, gamma2=4, **SMALL)
RUNS["tree, shaped"] = settings_of("triforce", 12, SHAPED, **SMALL, **TREE)
RUNS["tree, independent"] = settings_of("triforce", 12, WARM, **SMALL, **TREE)


def start(program: list[str]) -> list[subprocess.Popen]:
    """Two ranks, as torchrun would start them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    command, ranks = [sys.executable, "-m", *program], []
    for name in "01":
        env = os.environ | shared | {"RANK": name, "LOCAL_RANK": name}
        ranks.append(subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=env))
    return ranks


def finish(ranks: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Exit codes and messages of all."""
    messages = [rank.communicate(timeout=300)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], messages


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Random models. A vocabulary of 321 tokens is no multiple of two."""
    folder = tmp_path_factory.mktemp("split")
    for seed, name in enumerate(("plain", "again")):
        write_hf_folder(folder / name, seed=seed, vocab_size=321, attention_bias=True)
    write_hf_folder(folder / "tied", seed=1, vocab_size=321, tie_word_embeddings=True)
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    write_hf_folder(folder / "odd", **odd)
    return folder


@pytest.fixture(scope="module")
def seen(models) -> list[dict]:
    """What this process alone saw, then rank 0 and rank 1."""
    ranks = start(["tests.devices.parallel.test_two_ranks", str(models)])
    main(models)
    codes, messages = finish(ranks)
    assert codes == [0, 0], messages
    names = ("0 of 1", "0 of 2", "1 of 2")
    return [torch.load(models / f"{name}.pt", weights_only=True) for name in names]


@pytest.mark.parametrize("case", [*RUNS, "suffix", "tied"])
def test_two_ranks_write_the_text_of_one_process(seen, case):
    """Every method and drafter, in batches."""
    alone, first, second = (them[case] for them in seen)
    assert first[0] == alone[0]
    assert first == second  # their plans, too


def test_what_does_not_fit_is_one_line_on_all_ranks(seen):
    first, second = (them["mistakes"] for them in seen[1:])
    assert first == second
    for part, line in first:
        assert part in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("how", "which"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
    ],
)
def test_when_one_rank_ends_all_end_with_one_line(models, how, which):
    """A killed rank is noticed by the other. If texts end before it, another run is made."""
    flags = "--device cpu --ignore-eos --quiet --max-new-tokens 450 --method autoregressive"
    program = ["minitri.generate", "--model", str(models / "plain"), *flags.split()]
    codes = [0, 0]
    for _ in range(5):
        if codes == [0, 0]:
            ranks = start([*program, "--prompt", "She"])
            assert ranks[0].stdout.read(1)  # it has begun
            ranks[which].send_signal(how)
            codes, messages = finish(ranks)
    if how == signal.SIGINT:
        assert (codes, messages) == ([130, 130], ["", ""])
        return
    assert codes[1 - which] == 2
    assert "".join(messages).count("minitri: ") == 1
    assert which == 0 or messages[0].count("\n") == 1  # rank 0 keeps PyTorch's store here
    assert f"rank {1 - which} has lost the other ranks" in "".join(messages)


def load(folder: Path, name: str, draft: str = "suffix", **options: Any) -> Engine:
    options = {"dtype": "float32", "device": "cpu", "draft_weights": "same", **options}
    return minitri.load(folder / name, draft=draft, **options)


def mistakes(folder: Path, engine: Engine, rank: int) -> list[tuple[str, str]]:
    """What is to be said, and is, where the ranks, or a model, do not fit."""

    def load_other(name: str) -> None:
        """A model of which this rank finds other files than it should."""
        right = open_models.open_checkpoint
        with patch.object(open_models, "open_checkpoint", lambda _: right(folder / name)):
            load(folder, "plain")

    found, unread = [], InputError(f"rank {rank} cannot read it")
    for part, attempt in (
        ("split over 2 ranks", lambda: load(folder, "odd")),
        ("different models", lambda: load(folder, "plain", weights=["auto", "native"][rank])),
        ("different model files", lambda: load_other(["plain", "tied"][rank])),
        ("different model files", lambda: load_other(["plain", "again"][rank])),
        ("different prompts", lambda: engine.generate([PROMPTS[rank]])),
        ("seeds or settings", lambda: engine.generate(PROMPTS[0], seed=rank)),
        ("draft_weights=int4", lambda: load(folder, "plain", draft_weights="int4")),
        ("one GPU for 2 ranks", lambda: load(folder, "plain", device="cuda:0")),
        ("rank 0 cannot read it", lambda: join().ask_first(Mock(side_effect=unread))),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        found.append((part, str(caught.value)))
    return found


def main(folder: Path) -> None:
    """Writes into a file what this rank sees."""
    ranks, seen = join(), dict[str, Any]()
    if ranks.rank:
        real = time.perf_counter
        time.perf_counter = lambda: real() ** 2  # a clock that runs faster and faster
    drafted, tied = load(folder, "plain", str(folder / "tied")), load(folder, "tied")
    attempts = [(name, drafted, how) for name, how in RUNS.items()]
    attempts.append(("suffix", load(folder, "plain"), RUNS["naive, coupled"]))
    attempts.append(("tied", tied, RUNS["retrieval, greedy"]))
    for name, engine, how in attempts:
        with engine.generate(PROMPTS, **how) as run:
            texts = [list(text) for text in texts_of(run)]
        seen[name] = texts, run.stats.steps_per_plan
    if ranks.count > 1:
        seen["mistakes"] = mistakes(folder, tied, ranks.rank)
    torch.save(seen, folder / f"{ranks.rank} of {ranks.count}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
