"""A model split over two nodes: two launchers that meet at one rendezvous, here on one machine."""

import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from tests.conftest import write_hf_folder

TEXT = [
    "--max-new-tokens",
    "12",
    "--ignore-eos",
    "--temperature",
    "0.8",
    "--seed",
    "3",
    "--coupled",
]


def launch(*flags: object, program: list[str]) -> subprocess.Popen:
    """What is typed on one node."""
    launcher = ["-m", "torch.distributed.run", *map(str, flags), "-m"] if flags else ["-m"]
    command = [sys.executable, *launcher, *program]
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["autoregressive", "retrieval"])
def test_two_launchers_with_one_store_write_the_text_of_one_process(tmp_path, method):
    """Each has a rank; rank 0 alone shows the text."""
    model = write_hf_folder(tmp_path / "model", tie_word_embeddings=True)
    program = ["minitri.generate", "--model", str(model), "--device", "cpu", "--dtype", "float32"]
    program += ["--prompt", "She had been forced into prudence", "--method", method, *TEXT]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-id", "test", "--rdzv-backend", "c10d"]
    meeting += ["--rdzv-endpoint", place, "--local-addr", "127.0.0.1"]
    alone = launch(program=program)
    text, _ = alone.communicate(timeout=120)
    nodes = [launch(*meeting, program=program) for _ in range(2)]
    told = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert alone.returncode == 0
    assert sorted(out for out, _ in told) == ["", text]
    assert sum(err.count("tokens/s") for _, err in told) == 1
