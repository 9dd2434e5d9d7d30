"""The script of the first run on a GPU, and the pieces in which weights come to that machine."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import minitri
from minitri.core.errors import InputError
from tools import weight_pieces
from tools.weight_pieces import join_pieces, write_pieces

SCRIPT = Path(__file__).parents[3] / "tools/first_gpu_run.sh"


def test_limits_add_up_and_every_test_and_program_is_there():
    text = SCRIPT.read_text()
    calls = re.findall(r"^call_(\w+)\(\) \{\n(.*?)^\}", text, re.M | re.S)
    assert [name for name, _ in calls] == re.search(r'CALLS="(.*)"', text)[1].split()
    for _, body in calls:
        limits = re.findall(r'(?:part|tests|made_up) "[^"]+" (\d+)', body)
        assert 0 < sum(map(int, limits)) <= 520  # and the question whether there is a GPU
    for file in re.findall(r"tests/gpu\w*/\w+\.py", text):
        assert (SCRIPT.parents[1] / file).is_file()
    for module in re.findall(r"-m (\w+(?:\.\w+)+)", text):
        assert find_spec(module), module


def test_weights_arrive_in_pieces_and_are_the_same_but_for_rounding(folder, tmp_path, monkeypatch):
    """A matrix may be cut; a piece that is missing is noticed."""
    monkeypatch.setattr(weight_pieces, "LIMIT", 60_000)
    monkeypatch.setattr(weight_pieces, "RUN", 5_000)
    pieces, joined = tmp_path / "pieces", tmp_path / "joined"
    write_pieces(str(folder), pieces)
    files = sorted(pieces.iterdir())
    assert len(files) > 2
    join_pieces(pieces, joined)
    ours, theirs = (minitri.load(x, dtype="float32", device="cpu") for x in (joined, folder))
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids
    assert ours.tokenizer.encode("the harbour") == theirs.tokenizer.encode("the harbour")
    for got, exact in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (got - exact).abs().max() <= 0.01 * exact.abs().max()
    files[1].unlink()
    with pytest.raises(InputError, match="not hold one whole set of pieces, got piece-1-of"):
        join_pieces(pieces, joined)
