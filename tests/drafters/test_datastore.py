"""Datastores: what is found in them, and files that are refused in one line."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from minitri.drafters.datastore import (
    LONGEST,
    Datastore,
    open_datastore,
    sorted_places,
    write_datastore,
)
from minitri.errors import InputError

END = 30
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4)


def datastore_of(*texts: list[int]) -> Datastore:
    tokens = np.array([*itertools.chain(*([*text, END] for text in texts))], np.uint16)
    return Datastore(tokens, sorted_places(tokens))


def common_end(text: list[int], sequence: list[int]) -> int:
    pairs = zip(reversed(text), reversed(sequence), strict=False)
    return min(LONGEST, [*(a == b for a, b in pairs), False].index(False))


def brute_force(texts: list[list[int]], sequence: list[int], limit: int) -> tuple[int, list[int]]:
    """The definition: all places of all texts, then votes on every token that follows."""
    places = [(text, i) for text in texts for i in range(1, len(text) + 1)]
    lengths = [common_end(text[:i], sequence) for text, i in places]
    best, guess = max(lengths, default=0), []
    if best < 2:
        return 0, []
    rests = [
        [*text[i:], END] for (text, i), length in zip(places, lengths, strict=True)
        if length == best
    ]  # fmt: skip
    for i in range(limit):
        votes = Counter(rest[i] for rest in rests)
        winner = max(votes, key=lambda token: (votes[token], -token))
        if winner == END:
            break
        guess.append(winner)
        rests = [rest for rest in rests if rest[i] == winner]
    return best, guess


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 6))
def test_what_most_often_followed_the_longest_match_is_found(texts, sequence, limit):
    assert datastore_of(*texts).lookup(sequence, limit) == brute_force(texts, sequence, limit)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80) | st.just([1] * 200))
def test_places_are_sorted_by_what_stands_before_them(tokens):
    def before(place: int) -> list[int]:
        return tokens[max(place + 1 - LONGEST, 0) : place + 1][::-1]

    wanted = sorted(range(len(tokens)), key=lambda place: (before(place), place))
    assert sorted_places(np.array(tokens, np.uint16)).tolist() == wanted


def test_no_match_crosses_from_one_text_into_another():
    assert datastore_of([7, 1, 2], [3, 4, 5]).lookup([1, 2, 3, 4], 9) == (2, [5])
    assert datastore_of([7, 1, 2], [3, 4, 5]).lookup([7, 1, 2], 9) == (3, [])


def test_a_long_match_is_measured_up_to_its_limit():
    text = [*range(20), *range(20), 25]
    assert datastore_of(text).lookup(text[:-1], 3) == (LONGEST, [25])


@pytest.mark.parametrize("num_tokens", [300, 70_000])
def test_a_file_holds_what_was_written_and_is_mapped(tmp_path, num_tokens):
    file = tmp_path / "a file"
    last = num_tokens - 1
    size = write_datastore(file, [[1, 2, last], [], [5, last]], num_tokens, "vocabulary")
    opened = open_datastore(file, "vocabulary")
    assert (opened.num_tokens, opened.lookup([9, 1, 2], 4)) == (8, (2, [last]))
    assert (file.stat().st_size, list(tmp_path.iterdir())) == (size, [file])
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(file) in maps.read_text()


def test_a_datastore_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "it"
    write_datastore(file, [[1, 2]], 300, "vocabulary")

    def full_disk(arrays, path, facts):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minitri.drafters.datastore.save_file", full_disk)
    with pytest.raises(InputError, match="No space"):
        write_datastore(file, [[3, 4]], 300, "vocabulary")
    assert list(tmp_path.iterdir()) == [file]
    assert open_datastore(file, "vocabulary").num_tokens == 3


@pytest.fixture
def file(tmp_path) -> Path:
    write_datastore(tmp_path / "it", [list(range(300))], 300, "vocabulary")
    return tmp_path / "it"


def refusal(file: Path, vocabulary: str = "vocabulary") -> str:
    with pytest.raises(InputError) as caught:
        open_datastore(file, vocabulary)
    line = str(caught.value)
    assert "\n" not in line
    assert str(file) in line
    assert line.endswith("build it again with tools/build_datastore.py")
    return line


def test_a_datastore_of_another_tokenizer_is_refused(file):
    assert "another tokenizer" in refusal(file, "another vocabulary")


@pytest.mark.parametrize("kept", [0, 5, 8, 60, 500, -1])
def test_a_truncated_datastore_is_refused(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    assert "cannot be read" in refusal(file)


@pytest.mark.parametrize("place", [-1, -700, -1300])
def test_a_damaged_datastore_is_refused(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    assert "damaged" in refusal(file)


def test_what_is_no_datastore_is_refused(file, tmp_path):
    assert "no datastore" in refusal(tmp_path / "missing")
    assert "no datastore" in refusal(tmp_path)
    save_file({"tokens": torch.zeros(3)}, file)
    assert "its format is None" in refusal(file)
    facts = {"format": "minitri datastore 1", "vocabulary": "vocabulary"}
    save_file({"tokens": torch.zeros(3)}, file, facts)
    assert "cannot be read" in refusal(file)
