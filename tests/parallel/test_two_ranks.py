"""A model split over two processes writes the texts of one: gloo on a CPU stands for NCCL on GPUs.

Two ranks and a process alone make the same runs (`worker.py`), at the same time. Everything is
float32, where only a near-tie could tell them apart.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import write_hf_folder
from tests.parallel.worker import RUNS

CASES = [f"{name}, {sampling}, {draft}" for draft, name, sampling in RUNS]


def start(program: list[str], num_ranks: int = 1, **options) -> list[subprocess.Popen]:
    """A process per rank, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(num_ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        env |= {name: str(value) for name, value in names.items()}
        ranks.append(subprocess.Popen([sys.executable, "-m", *program], env=env, **options))
    return ranks


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
    program = ["tests.parallel.worker", str(models)]
    for process in start(program) + start(program, 2):
        assert process.wait(timeout=300) == 0
    names = ("0 of 1", "0 of 2", "1 of 2")
    return [torch.load(models / f"{name}.pt", weights_only=True) for name in names]


@pytest.mark.parametrize("case", [*CASES, "tied"])
def test_two_ranks_write_the_text_of_one_process(seen, case):
    """With every method and drafter, in batches; rank 1's seed is another where that may matter."""
    (alone, plans), first, second = (them[case] for them in seen)
    assert first[0] == alone
    assert first == second
    assert plans if "auto" in case else plans == first[1]


def test_the_kv_cache_of_a_rank_may_be_in_host_memory(seen):
    alone, first, second = (them["offloaded"] for them in seen)
    assert alone == first == second
    assert first == seen[1]["triforce, greedy, model"][0]


def test_what_does_not_fit_is_one_line_on_all_ranks(seen):
    first, second = (them["mistakes"] for them in seen[1:])
    assert first == second
    told = {
        "odd heads": "cannot be split over 2 ranks",
        "other flags": "the ranks were given different models, or ways to load them; start all",
        "other shapes": "the ranks were given different model files, or memory for the drafter;",
        "other files": "the ranks were given different model files, or memory for the drafter;",
        "other prompts": "the ranks were given different prompts, seeds or settings; start all",
        "other seeds": "the ranks were given different prompts, seeds or settings; start all",
        "int4": "--draft-weights int4 needs the compiled kernels",
        "one GPU": "is one GPU for 2 ranks",
        "of rank 0": "rank 0 cannot read it",
    }
    for name, line in told.items():
        assert line in first[name]
        assert "\n" not in first[name]


def generate(models: Path, *flags: str) -> list[str]:
    model = str(models / "plain")
    return ["minitri.generate", "--model", model, "--device", "cpu", "--ignore-eos", *flags]


def finish(ranks: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each."""
    ended = [rank.communicate(timeout=30) for rank in ranks]
    pairs = zip(ranks, ended, strict=True)
    return [(rank.returncode, out, messages) for rank, (out, messages) in pairs]


@pytest.mark.slow
def test_torchrun_shows_one_text_of_one_prompt_from_standard_input(models):
    program = generate(models, "--prompt-file", "-", "--max-new-tokens", "8", "--method", "naive")
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        *program,
    ]
    text = "She had been forced into prudence"
    run = subprocess.run(program, input=text, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    alone = subprocess.run(
        [sys.executable, "-m", *program[6:]], input=text, capture_output=True, text=True
    )
    assert run.stdout == alone.stdout
    assert run.stderr.count("tokens/s") == 1  # the summary, once


@pytest.mark.parametrize(
    ("how", "which"), [(signal.SIGKILL, 1), (signal.SIGKILL, 0), (signal.SIGINT, 1)]
)
def test_when_one_rank_ends_all_end_with_one_line(models, how, which):
    """A rank that is killed is noticed by the other; one that is interrupted says so itself.

    On a busy machine a text may be whole before the signal comes; then another run is made.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    flags = ("--quiet", "--max-new-tokens", "450", "--method", "autoregressive", "--prompt", "She")
    code = other = 0
    for _ in range(5):
        if code == other == 0:
            ranks = start(generate(models, *flags), 2, **pipes)
            assert ranks[0].stdout.read(1)  # it has begun
            ranks[which].send_signal(how)
            (code, _, messages), (other, _, others) = finish(ranks)
    if how == signal.SIGKILL:
        assert (code, other)[1 - which] == 2
        assert (messages + others).count("minitri: ") == 1
        assert which == 0 or messages.count("\n") == 1  # rank 0 keeps PyTorch's store here
        assert f"rank {1 - which} has lost the other ranks" in messages + others
    else:
        assert (code, other) == (130, 130)
        assert messages + others == ""


def test_a_bad_flag_is_told_once(models):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    (code, _, first), (other, _, second) = finish(
        start(generate(models, "--gamma1", "x"), 2, **pipes)
    )
    assert (code, other) == (2, 2)
    assert (first + second).count("\n") == 1
