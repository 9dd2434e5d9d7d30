"""Training data of a drafter: tokens with the target's next-token distributions, on disk.

The target's forward pass is the expensive part of distillation, so it is done once. A distribution
is kept as its `TOP` most likely tokens with their log-probabilities, 192 bytes per token. Sequences
have a fixed length, so a folder of an interrupted run is as long as its files, and goes
on from there.

Texts are cut into sequences, and the target writes sequences of its own: a beginning from the
texts, continued at one of several temperatures, because what a drafter guesses later is what the
target says, not what books say.

Legend: N sequences, W tokens of each, B sequences at once, T tokens at once, V vocab.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.decoding.sampling import probs_from_logits, sample
from minitri.core.errors import InputError, explain
from minitri.core.model.block import read_block
from minitri.core.model.llama import Llama
from minitri.core.settings import SamplingParams
from minitri.engine import Engine
from minitri.files.hf_folder import read_json

Array = np.ndarray[Any, Any]
W = 1024
"""Tokens of a sequence."""
TOP = 32
"""Tokens of a distribution that are kept."""
BEGINNING = 256
"""Tokens of a text that the target continues to a sequence of its own."""
BATCH = 32
"""Sequences that the target continues together."""
TEMPERATURES = (0.0, 0.6, 0.6, 1.0)
"""At which they are continued, in turn."""


class LabelStore:
    """Sequences and their distributions, in three flat files.

    They hold tokens, ids of the likeliest next tokens, and log-probabilities.
    """

    def __init__(self, folder: Path, meta: dict[str, object]) -> None:
        """Opens or makes a folder. Raises `InputError` if it was made for another `meta`."""
        folder.mkdir(parents=True, exist_ok=True)
        meta = {**meta, "W": W, "TOP": TOP}
        if (folder / "meta.json").exists():
            found = read_json(folder / "meta.json")
            if found != meta:
                problem = f"{folder} was made with other settings ({found})"
                raise InputError(f"{problem}; delete it, or repeat those settings")
        else:
            (folder / "meta.part").write_text(json.dumps(meta))
            (folder / "meta.part").replace(folder / "meta.json")
        self._files: list[tuple[Path, np.dtype[Any], tuple[int, ...]]] = [
            (folder / "tokens.bin", np.dtype(np.int32), (W,)),
            (folder / "ids.bin", np.dtype(np.int32), (W, TOP)),
            (folder / "logprobs.bin", np.dtype(np.float16), (W, TOP)),
        ]
        for file, _, _ in self._files:
            file.touch()
        self.cut(len(self))  # an interrupted `append` may have left a part of a sequence

    def __len__(self) -> int:
        return min(
            file.stat().st_size // (dtype.itemsize * int(np.prod(shape)))
            for file, dtype, shape in self._files
        )

    def append(self, tokens_W: Tensor, ids: Tensor, logprobs: Tensor) -> None:
        """Adds a sequence: its tokens (W,), and the likeliest (W, TOP) after each token."""
        labels = zip(self._files[1:], (ids, logprobs), strict=True)
        for (file, dtype, _), values in (*labels, (self._files[0], tokens_W)):
            with file.open("ab") as sink:
                sink.write(values.numpy().astype(dtype).tobytes())

    def arrays(self) -> tuple[Array, Array, Array]:
        """Tokens (N, W), ids (N, W, TOP) and log-probabilities (N, W, TOP), on disk."""
        N = len(self)
        if N == 0:
            folder = self._files[0][0].parent
            raise InputError(f"{folder} has no sequence to learn from; ask for more tokens")
        tokens, ids, logprobs = (
            np.memmap(file, dtype=dtype, mode="r", shape=(N, *shape))
            for file, dtype, shape in self._files
        )
        return tokens, ids, logprobs

    def cut(self, N: int) -> None:
        """Keeps the first N sequences."""
        for file, dtype, shape in self._files:
            with file.open("r+b") as opened:
                opened.truncate(N * dtype.itemsize * int(np.prod(shape)))


def read_texts(engine: Engine, files: list[Path]) -> list[list[int]]:
    """Token ids of every text. Raises `InputError` if one cannot be read, or all are too short."""
    texts = []
    for file in files:
        with explain(f"cannot read {file} as UTF-8 text", "check --text and --held-out"):
            text = file.read_text(encoding="utf-8-sig")
        texts.append(engine.tokenizer.encode(text) if text else [])
    if engine.config.context_length < W:
        raise InputError(
            f"{engine.config.name} holds {engine.config.context_length} tokens but training needs "
            f"{W}; give a model with a longer context"
        )
    longest = max(map(len, texts))
    if longest < W:
        problem = f"the longest text has {longest} tokens; training needs at least {W} in one text"
        raise InputError(f"{problem}, give more")
    return texts


def sequences_of(texts: list[list[int]], bos: int | None, seed: int) -> list[list[int]]:
    """All whole sequences of the texts, shuffled; each begins as a prompt does, with BOS if any."""
    begin = [] if bos is None or any(text[:1] != [bos] for text in texts if text) else [bos]
    size = W - len(begin)
    sequences = [
        begin + text[i : i + size]
        for text in texts
        for i in range(len(begin), len(text) - size + 1, size)
    ]
    random.Random(seed).shuffle(sequences)
    return sequences


@torch.inference_mode()
def label(
    model: Llama, sequences: list[list[int]], store: LabelStore, done: Callable[[int], None]
) -> None:
    """Adds these sequences to a store; `done` is told how many tokens each step made."""
    cache = FullCache.allocate(model, 1, W)
    for tokens in sequences:
        cache.reset(0)
        ids, logprobs = _labels(model, read_block(model, [tokens], cache))
        store.append(torch.tensor(tokens), ids[0], logprobs[0])
        done(W)


@torch.inference_mode()
def continue_texts(
    model: Llama,
    beginnings: Iterator[list[int]],
    num_batches: int,
    store: LabelStore,
    seed: int,
    done: Callable[[int], None],
) -> None:
    """Adds batches of sequences that the target has written itself, EOS tokens included."""
    cache = FullCache.allocate(model, BATCH, W)
    num_kinds = len(TEMPERATURES)
    rows_at = {
        t: [b for b in range(BATCH) if TEMPERATURES[b % num_kinds] == t] for t in TEMPERATURES
    }
    for _ in range(num_batches):
        generator = torch.Generator().manual_seed(seed + len(store))
        sequences = [next(beginnings)[:BEGINNING] for _ in range(BATCH)]
        labels = []
        cache.crop([0] * BATCH)
        while cache.lengths[0] < W:
            fresh = [tokens[cache.lengths[0] :] for tokens in sequences]
            hidden_BTE = read_block(model, fresh, cache)
            cache.advance([len(row) for row in fresh])
            labels.append(_labels(model, hidden_BTE))
            done(BATCH * len(fresh[0]))
            logits_BV = model.logits(hidden_BTE[:, -1])
            uniforms_B = torch.rand(BATCH, dtype=torch.float64, generator=generator)
            for temperature, rows in rows_at.items():
                probs = probs_from_logits(logits_BV[rows].cpu(), SamplingParams(temperature))
                for b, token in zip(rows, sample(probs, uniforms_B[rows]).tolist(), strict=True):
                    sequences[b].append(token)
        ids, logprobs = (torch.cat(parts, 1) for parts in zip(*labels, strict=True))
        for b, tokens in enumerate(sequences):
            store.append(torch.tensor(tokens[:W]), ids[b], logprobs[b])


def _labels(model: Llama, hidden_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, (B, T, TOP) each, of the likeliest tokens."""
    ids, logprobs = [], []
    for part in hidden_BTE.flatten(0, 1).split(W):
        logits = model.logits(part)
        best = logits.topk(TOP)
        ids.append(best.indices.cpu())
        logprobs.append((best.values - logits.logsumexp(-1, keepdim=True)).cpu())
    B, T, _ = hidden_BTE.shape
    return torch.cat(ids).view(B, T, TOP), torch.cat(logprobs).view(B, T, TOP)
