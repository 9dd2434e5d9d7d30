"""The paper's drafters as plug-ins, a datastore and layers of the target, and their tools."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import minitri
from minitri.errors import InputError
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
from minitri.model.llama import Llama
from tests.cascades import WARM, fresh_read, random_prompt, settings_of
from tests.conftest import SENTENCES, byte_level_tokenizer, tiny_config, tiny_model, write_hf_folder
from tools.paper import build_datastore, find_layers
from tools.paper.baselines import datastore
from tools.paper.baselines.datastore import (
    LONGEST,
    Datastore,
    fingerprint,
    open_datastore,
    sorted_places,
    write_datastore,
)
from tools.paper.baselines.skipped_layers import (
    SkippedLayers,
    read_layers,
    with_layers,
    write_layers,
)

PROMPT = "She had been forced into prudence; she had been"
END = 30
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4)
WORDS = Tokenizer(TokenizersBackend(byte_level_tokenizer()), 1)


def other_words() -> Tokenizer:
    more = byte_level_tokenizer()
    more.add_tokens(["another token"])
    return Tokenizer(TokenizersBackend(more), 1)


def datastore_of(*texts: list[int], end: int = END) -> Datastore:
    tokens = np.array([*itertools.chain(*([*text, end] for text in texts))], np.uint16)
    return Datastore(tokens, sorted_places(tokens))


def brute_force(texts: list[list[int]], sequence: list[int]) -> int | None:
    """The definition: all places of all texts, then a vote on what follows the longest match."""

    def common_end(text: list[int]) -> int:
        pairs = zip(reversed(text), reversed(sequence), strict=False)
        return min(LONGEST, [*(a == b for a, b in pairs), False].index(False))

    places = [(text, i) for text in texts for i in range(1, len(text) + 1)]
    lengths = [common_end(text[:i]) for text, i in places]
    best = max(lengths, default=0)
    rests = [[*t[i:], END] for (t, i), n in zip(places, lengths, strict=True) if n == best]
    votes = Counter(rest[0] for rest in rests)
    winner = max(votes, key=lambda token: (votes[token], -token), default=END)
    return winner if best >= 2 and winner != END else None


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12))
def test_what_most_often_followed_the_longest_match_is_found(texts, sequence):
    assert datastore_of(*texts).guess(sequence, 0) == brute_force(texts, sequence)


@pytest.fixture
def file(tmp_path) -> Path:
    write_datastore(tmp_path / "it", [[1, 2, 299], [], list(range(300))], WORDS)
    return tmp_path / "it"


def test_a_file_holds_what_was_written(file, tmp_path, monkeypatch):
    opened = open_datastore(file, WORDS)
    assert (opened.num_tokens, opened.guess([9, 1, 2], 0)) == (306, 3)
    assert list(tmp_path.iterdir()) == [file]

    def full_disk(arrays, path, facts):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datastore, "save_file", full_disk)
    with pytest.raises(InputError, match="No space"):
        write_datastore(file, [[3, 4]], WORDS)
    assert list(tmp_path.iterdir()) == [file]
    assert open_datastore(file, WORDS).num_tokens == 306


def edit(change):
    """Damage: other bytes in a file."""
    return lambda file: file.write_bytes(change(bytearray(file.read_bytes())))


def flipped(place: int):
    return edit(lambda content: content[:place] + bytes([content[place] ^ 4]) + content[place:][1:])


def refused(file: Path, words: str, read, *what: object) -> None:
    """In one line that names the file."""
    with pytest.raises(InputError, match=words) as caught:
        read(file, *what)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


FACTS = {"format": "minitri datastore 1", "vocabulary": fingerprint(WORDS)}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        *((edit(lambda it, n=length: it[:n]), "cannot be read") for length in (0, 8, 60, -1)),
        *((flipped(place), "damaged") for place in (-2, -1300)),
        (lambda file: file.unlink(), "no datastore"),
        (lambda file: save_file({"tokens": torch.zeros(3)}, file), "its format is None"),
        (lambda file: save_file({"tokens": torch.zeros(3)}, file, FACTS), "cannot be read"),
        (lambda file: write_datastore(file, [[1]], other_words()), "another tokenizer"),
    ],
)
def test_a_datastore_that_does_not_fit_is_refused_in_one_line(file, damage, words):
    damage(file)
    refused(file, words, open_datastore, WORDS)


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> minitri.Engine:
    folder = write_hf_folder(tmp_path_factory.mktemp("deep") / "deep", num_hidden_layers=4)
    return minitri.load(folder, draft="suffix", dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["said", [0, 2], [0, 1, 2, 3]], ids=str)
def test_a_baseline_guesses_and_changes_no_text(deep, kind):
    """A datastore that holds the text; some layers of the target, and all; a short prompt, and one
    longer than the window of the layers."""
    for prompt in (deep.tokenizer.encode(PROMPT), random_prompt(deep.config, 400)):
        plain = deep.complete(prompt, **settings_of(sampling=WARM, coupled=True)).token_ids
        if kind == "said":
            drafter = datastore_of([*prompt, *plain], end=deep.tokenizer.num_tokens)
        else:
            drafter = SkippedLayers(deep.model, kind)
        engine = minitri.Engine(deep.model, deep.tokenizer, drafter=drafter)
        settings = settings_of("naive", sampling=WARM, coupled=True, gamma1=3)
        for _ in range(2):  # the second with what the first left
            done = engine.complete(prompt, **settings)
            assert done.token_ids == plain
        draft = done.stats.levels[0]
        assert kind != "said" or draft.num_accepted_tokens > 16
        assert len(prompt) == 400 or len(kind) < 4 or kind == "said" or draft.acceptance_rate == 1


@pytest.mark.parametrize("layers", [[0, 3], [4], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_a_view_is_the_model_of_these_layers_and_has_no_weights(layers):
    config = tiny_config(num_layers=5)
    model, expected = tiny_model(config), tiny_model(tiny_config(num_layers=len(layers)))
    weights = dict(model.named_parameters())
    for name, weight in expected.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(layers[int(parts[1])])
        weight.copy_(weights[".".join(parts)])
    tokens, view = random_prompt(config, 9), with_layers(model, layers)
    assert isinstance(view, Llama)
    assert torch.equal(fresh_read(view, tokens)[1], fresh_read(expected, tokens)[1])
    assert {id(w) for w in view.parameters()} <= {id(w) for w in model.parameters()}
    assert (model.config.num_layers, len(model.layers)) == (5, 5)


def change(**facts):
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        *(
            (edit(lambda _, it=content: it), "cannot be read")
            for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000)
        ),
        (edit(lambda _: b"[]"), "no file of layers"),
        (change(format="another"), "no file of layers"),
        (change(num_layers=30), "num_layers 30"),
        (change(hidden_size=[1]), "hidden_size"),
        (change(vocabulary="0"), "vocabulary"),
        *(
            (change(layers=layers), "numbers from 0 to 3")
            for layers in ([], [0, 4], [-1, 2], [1, 1], [2, 1], [True], [0, 1.0], "01", None)
        ),
    ],
)
def test_a_file_of_layers_that_does_not_fit_is_refused_in_one_line(deep, tmp_path, damage, words):
    file, what = tmp_path / "it", (deep.config, deep.tokenizer)
    write_layers(file, [0, 2], *what)
    assert read_layers(file, *what) == [0, 2]
    damage(file)
    refused(file, words, read_layers, *what)


def test_the_tools_write_what_the_drafters_read(folder, tmp_path, call):
    (tmp_path / "text").write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    engine = minitri.load(folder, draft="suffix", device="cpu")
    flags = ("--model", folder, "--out", tmp_path / "store", tmp_path / "text")
    code, out, _ = call(build_datastore.main, *flags)
    assert code == 0
    assert " tokens of 1 texts" in out
    store = open_datastore(tmp_path / "store", engine.tokenizer)
    tokens = engine.tokenizer.encode(SENTENCES[0])
    assert store.guess(tokens[:-1], 0) == tokens[-1]
    flags = (folder, tmp_path / "text", "--keep", "1", "--dtype", "float32", "--swaps", "3")
    for name in ("one", "two"):
        code, out, _ = call(find_layers.main, *flags, "--out", tmp_path / name)
        assert code == 0
        assert "overlap 0." in out
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    assert len(read_layers(tmp_path / "one", engine.config, engine.tokenizer)) == 1


@pytest.mark.parametrize(
    ("tool", "flags", "words"),
    [
        (find_layers, "{folder} {text} --keep 5", "--keep is 5"),
        (find_layers, "{folder} {text} --keep 2 --temperature nan", "temperature is nan"),
        (find_layers, "{folder} {text} --keep 2 --out missing/it", "cannot write missing/it"),
        (find_layers, "{folder} {text} --keep 2 --windows 0", "whole number"),
        (find_layers, "{folder} {short} --keep 2", "128 or more"),
        (build_datastore, "--model {folder} missing", "cannot read missing"),
        (build_datastore, "--model {folder} {folder}/model.safetensors", "UTF-8"),
        (build_datastore, "--model {folder} {short} --out missing/it", "cannot write missing/it"),
        (build_datastore, "--model no-such-model {short}", "unknown model"),
    ],
)
def test_bad_input_to_a_tool_is_one_line(folder, tmp_path, call, tool, flags, words):
    text, short = tmp_path / "text", tmp_path / "short"
    text.write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    short.write_text("short")
    flags = flags.format(folder=folder, text=text, short=short).split()
    code, out, err = call(tool.main, "--out", tmp_path / "it", *flags)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
