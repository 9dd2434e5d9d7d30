"""Finds layers of a model that guess well what all of them say (`baselines/skipped_layers.py`).

    python -m tools.paper.find_layers smollm2-135m novel.txt --keep 14 --out smollm2-14.layers

Layer skipping, or self-speculation (Draft & Verify, arXiv 2309.08168). Windows of the text, drawn
at random, are read by all layers and by those that are kept; the score of a choice is the mean
overlap sum(min(p, q)) of the two distributions after their last tokens, the chance that a guess is
accepted (at temperature 0 whether the likeliest tokens agree). Layers are removed one by one, each
time the one that is missed least. Then some are exchanged at random, where that scores better. The
search takes minutes on 2 cores for 135M parameters; other windows tell how good its result is.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.cli import arguments
from minitri.cli.exits import program
from minitri.cli.inputs import read_prompt
from minitri.errors import InputError
from minitri.loader import load
from minitri.loading.prompt_ids import MAX_SEED
from minitri.model.block import read_block
from minitri.model.llama import Llama
from tools.paper.baselines.skipped_layers import with_layers, write_layers

WINDOW, NUM_SCORED = 128, 64
"""Tokens of a window, and how many of its last ones are scored."""


def build_parser() -> arguments.OneLineParser:
    parser, shown = arguments.OneLineParser(description=__doc__), "(default: %(default)s)"
    parser.add_argument("model", metavar="MODEL", help="what --model of minitri.generate takes")
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file to calibrate on")
    number: dict[str, Any] = {"type": arguments.positive, "metavar": "N"}
    parser.add_argument("--keep", required=True, help="layers to keep", **number)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    for name, count, text in (
        ("windows", 8, "windows to score"),
        ("swaps", 40, "exchanges to try"),
    ):
        kind = arguments.whole(0) if name == "swaps" else arguments.positive
        options: dict[str, Any] = {"type": kind, "default": count, "metavar": "N"}
        parser.add_argument(f"--{name}", help=f"{text} {shown}", **options)
    text = f"of the distributions that are compared {shown}"
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T", help=text)
    seed = arguments.whole(0, MAX_SEED)
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help=f"of windows, swaps {shown}"
    )
    parser.add_argument("--dtype", default="auto", help=f"as for minitri.generate {shown}")
    return parser


class Scorer:
    """How well some layers of a model guess what all say after windows of a text."""

    def __init__(self, model: Llama, windows: list[list[int]], temperature: float) -> None:
        self._model, self._windows, self._temperature = model, windows, temperature
        self._all_NV = self._probs(range(model.config.num_layers))
        self._known: dict[tuple[int, ...], float] = {}

    def score(self, layers: list[int]) -> float:
        """The mean chance that a guess of these layers is accepted."""
        key = tuple(layers)
        if key not in self._known:
            overlap_N = torch.minimum(self._probs(layers), self._all_NV).sum(1)
            self._known[key] = float(overlap_N.mean())
        return self._known[key]

    def _probs(self, layers: range | list[int]) -> Tensor:
        """The distributions (N, V) after the last tokens of all windows."""
        view = with_layers(self._model, layers)
        cache = FullCache.allocate(
            view.config, len(self._windows), WINDOW, dtype=view.dtype, device=view.device
        )
        hidden_BTE = read_block(view, self._windows, cache)[:, -NUM_SCORED:]
        logits_NV = view.logits(hidden_BTE.flatten(0, 1))
        if self._temperature == 0:
            likeliest_N1 = logits_NV.argmax(1, keepdim=True)
            return torch.zeros_like(logits_NV).scatter_(1, likeliest_N1, 1.0)
        return (logits_NV / self._temperature).softmax(1)


def search(scorer: Scorer, num_layers: int, args: argparse.Namespace) -> list[int]:
    """The layers to keep: greedy removal, then exchanges."""
    kept, missed_least = list(range(num_layers)), [1.0] * num_layers
    while len(kept) > args.keep:
        # What a layer scored with more layers around it is hardly less than what it scores now.
        scored: set[int] = set()
        while (layer := max(kept, key=missed_least.__getitem__)) not in scored:
            missed_least[layer] = scorer.score([other for other in kept if other != layer])
            scored.add(layer)
        kept.remove(layer)
        show(f"{len(kept)} layers, without {layer}: {missed_least[layer]:.3f}")
    rng, best = random.Random(args.seed), scorer.score(kept)
    left_out = [layer for layer in range(num_layers) if layer not in kept]
    for number in range(args.swaps if left_out else 0):
        out, new = rng.choice(kept), rng.choice(left_out)
        other = sorted({*kept, new} - {out})
        if (score := scorer.score(other)) > best:
            kept, best = other, score
            left_out = [layer for layer in range(num_layers) if layer not in kept]
            show(f"exchange {number + 1}: {new} for {out}: {best:.3f}")
    return kept


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def draw_windows(ids: list[int], count: int, rng: random.Random) -> list[list[int]]:
    starts = (rng.randrange(len(ids) - WINDOW + 1) for _ in range(count))
    return [ids[start : start + WINDOW] for start in starts]


@torch.inference_mode()
def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    text = read_prompt(args.text)
    if not 0 <= args.temperature <= 100:
        raise InputError(f"the temperature is {args.temperature}; give one from 0 to 100")
    engine = load(args.model, draft="suffix", draft_weights="same", dtype=args.dtype, progress=True)
    config, ids, started = engine.config, engine.tokenizer.encode(text), time.perf_counter()
    if args.keep > config.num_layers:
        raise InputError(f"--keep is {args.keep}, but {config.name} has {config.num_layers} layers")
    if len(ids) < WINDOW:
        raise InputError(f"{args.text} has {len(ids)} tokens; give a text of {WINDOW} or more")
    rng = random.Random(args.seed)
    scorers = [
        Scorer(engine.model, draw_windows(ids, args.windows, rng), args.temperature)
        for _ in range(2)
    ]
    layers = search(scorers[0], config.num_layers, args)
    write_layers(args.out, layers, config, engine.tokenizer)
    found, others = (scorer.score(layers) for scorer in scorers)
    print(
        f"{args.out}: layers {' '.join(map(str, layers))} of {config.name}; overlap {found:.3f}, "
        f"{others:.3f} in other windows; {time.perf_counter() - started:.0f} s"
    )


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
