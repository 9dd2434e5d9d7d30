"""A tour of the method on real weights, in two minutes: four pictures in one PNG, and a few lines.

    python -m tools.tour --prompt-file novel.txt --out tour.png

1. Where the attention of the latest tokens lies: few tokens hold nearly all of it, and which ones
   no fixed window knows (TriForce, section 3.1).
2. What the retrieval cache keeps of the text, layer by layer, and how long that stays right
   (sections 3.2 and 4.1).
3. Who guessed which token of a text that TriForce writes.
4. What a token costs after texts of several lengths.
"""

import argparse
import math
import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.apps.cli import arguments
from minitri.apps.cli.boot import load_engine
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import read_prompt
from minitri.apps.cli.terminal import LEGEND, colored
from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import ChunkRetrieval, attention_received
from minitri.core.errors import InputError
from minitri.core.prefill import prefill
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.engine import Engine
from tools.flags import picture

WINDOW, SHIFT, CHUNK, NUM_SINKS = 16, 128, 8, 4
"""Tokens that ask together, and how far before them others asked; tokens of a chunk; sinks."""
SHARES = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
"""Shares of the text's tokens that a cache keeps."""
WARM = SamplingParams(0.6, top_p=0.9)
COLORS = {"draft": "#009E73", "retrieval": "#56B4E9", "recovered": "#D55E00", "bonus": "#E69F00"}
MEANINGS = {"draft": "drafter", "retrieval": "retrieval cache"}
MEANINGS |= {"bonus": "target", "recovered": "correction"}
WIDTH, LINES = 58, 12
"""Characters and lines of the text in the picture."""


@dataclass
class Reading:
    """KV cache of a text, and the queries (L, W, H, D) of two windows in it."""

    engine: Engine
    full: FullCache
    queries: list[Tensor]
    """Queries of the latest tokens, and of those SHIFT tokens before."""

    def attention(self, layer: int, num_tokens: int) -> Tensor:
        """The attention (K, S) that the first tokens get from the latest ones. That to the sinks,
        most of all, is left out, and the rest sums to 1."""
        scores_KS = attention_received(self._queries(layer, 0), self._keys(layer, num_tokens))
        scores_KS[:, :NUM_SINKS] = 0
        return scores_KS / scores_KS.sum(1, keepdim=True)

    def ranking(self, layer: int, window: int, num_tokens: int, budget: int) -> Tensor:
        """Chunks (K, N) of the first tokens, best first, as the retrieval cache ranks them for
        queries of a window: sinks, the latest, and then by the attention to their mean keys."""
        policy = ChunkRetrieval()
        keys_KSD = self._keys(layer, num_tokens // CHUNK * CHUNK)
        chunks_KNMD = keys_KSD.unflatten(1, (-1, CHUNK))
        scores_KN = policy.scores(layer, 0, self._queries(layer, window), chunks_KNMD).clone()
        recent = min(SpeculationConfig().num_recent_tokens, budget // 4) // CHUNK
        scores_KN[:, 0] = scores_KN[:, scores_KN.shape[1] - recent :] = math.inf
        return scores_KN.argsort(1, descending=True)

    def _queries(self, layer: int, window: int) -> Tensor:
        """Queries (K, R, D), grouped by KV head."""
        num_kv_heads = self.engine.config.num_kv_heads
        queries_WHD = self.queries[window][layer]
        return queries_WHD.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)

    def _keys(self, layer: int, num_tokens: int) -> Tensor:
        return self.full.keys[layer, 0, :, :num_tokens]


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(description=__doc__)
    arguments.add_flags(parser, *arguments.MODEL, "draft")
    arguments.add_prompt_flags(parser)
    parser.add_argument("--out", type=picture, default="tour.png", metavar="FILE.png")
    parser.set_defaults(max_prompt_tokens=8000, max_new_tokens=160, method="triforce")
    return parser


def read(engine: Engine, prompt: list[int]) -> Reading:
    """Reads a prompt, chunk by chunk, and keeps the queries of its last tokens."""
    model, seen = engine.model, list[Tensor]()
    full = FullCache.allocate(model, 1, len(prompt))
    last = SHIFT + WINDOW
    for _ in prefill(model, prompt, full, 0, chunk=1024, watch=seen.append, max_queries=last):
        pass
    queries_LTHD = torch.cat(seen, 1)[:, -last:]
    return Reading(engine, full, [queries_LTHD[:, -WINDOW:], queries_LTHD[:, :WINDOW]])


def draw_mass(axes: Any, reading: Reading) -> str:
    """Draws how much attention the best tokens, the best chunks, and a fixed window hold."""
    num_tokens = reading.full.lengths[0] - WINDOW
    kept = [max(2 * CHUNK, int(share * num_tokens)) for share in SHARES]
    masses: dict[str, list[list[float]]] = {}
    for layer in range(reading.engine.config.num_layers):
        exact_KS = reading.attention(layer, num_tokens)
        per_chunk_KN = exact_KS[:, : num_tokens // CHUNK * CHUNK].unflatten(1, (-1, CHUNK)).sum(2)
        best_KS = exact_KS.sort(1, descending=True).values.cumsum(1)
        chunks_K = []
        for n in kept:
            chosen_KC = reading.ranking(layer, 0, num_tokens, n)[:, : n // CHUNK]
            chunks_K.append(per_chunk_KN.gather(1, chosen_KC).sum(1))
        window_K = [exact_KS[:, NUM_SINKS - n :].sum(1) for n in kept]
        for name, values in (
            ("the best tokens", [best_KS[:, n - 1] for n in kept]),
            ("what the retrieval cache keeps", chunks_K),
            ("the first and the latest tokens", window_K),
        ):
            masses.setdefault(name, []).append([float(value.mean()) for value in values])
    for (name, rows), color in zip(masses.items(), ("#555555", "#56B4E9", "#D55E00"), strict=True):
        columns = [sorted(column) for column in zip(*rows, strict=True)]
        low, high = ([column[int(q * (len(column) - 1))] for column in columns] for q in (0.1, 0.9))
        shares = [100 * share for share in SHARES]
        middle = [100 * statistics.median(column) for column in columns]
        axes.plot(shares, middle, color=color, marker="o", markersize=4, label=name)
        band = [[100 * value for value in row] for row in (low, high)]
        axes.fill_between(shares, *band, color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", ylim=(0, 102), xlabel="tokens kept, % of the text", xticks=[1, 10, 50])
    axes.set_xticklabels(["1", "10", "50"])
    axes.set_title("1  attention mass held (beyond the sinks), %", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    place = SHARES.index(0.1)
    best, chunks, window = (
        statistics.median(row[place] for row in rows) for rows in masses.values()
    )
    return (
        f"Beyond the first {NUM_SINKS} tokens, a tenth of the text holds this much attention in "
        f"the median layer: the best tokens {best:.0%}, what the retrieval cache keeps "
        f"{chunks:.0%}, the first and the latest tokens {window:.0%}."
    )


def draw_choice(axes: Any, reading: Reading, budget: int) -> str:
    """Draws the chunks that each layer and KV head keeps, and kept SHIFT tokens before."""
    rows, shared, end = list[Tensor](), list[float](), reading.full.lengths[0] - SHIFT
    for layer in range(reading.engine.config.num_layers):
        masks = []
        for window in (0, 1):
            ranked_KN = reading.ranking(layer, window, end, budget)
            kept_KN = torch.zeros_like(ranked_KN).scatter(1, ranked_KN[:, : budget // CHUNK], 1)
            masks.append(kept_KN)
        shared.append(float((masks[0] * masks[1]).sum() / masks[0].sum()))
        rows.append(masks[0] + masks[0] * masks[1])  # 1: new, 2: kept then, too
    picture = torch.cat(rows).float().numpy()
    from matplotlib.colors import ListedColormap

    extent = (0, picture.shape[1] * CHUNK, reading.engine.config.num_layers, 0)
    colors = ListedColormap(["#f4f4f4", "#E69F00", "#56B4E9"])
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 2}
    axes.imshow(picture, extent=extent, cmap=colors, **how)
    axes.set(xlabel="position in the text, tokens", ylabel="layer")
    axes.set_title("2  chunks in the retrieval cache", loc="left")
    for label, color in (("kept before, too", "#56B4E9"), ("new", "#E69F00")):
        axes.plot([], [], "s", color=color, label=label)
    axes.legend(frameon=True, fontsize=8, loc="lower center", ncol=2)
    return (
        f"The retrieval cache keeps {budget} of {picture.shape[1] * CHUNK} tokens, other ones for "
        f"every KV head; {statistics.median(shared):.0%} of its chunks (median layer) would have "
        f"been chosen {SHIFT} tokens before, so it serves for a while."
    )


def speculation(method: str, budget: int) -> SpeculationConfig:
    return SpeculationConfig(method, gamma1=2, gamma2=6, budget=budget)


def draw_text(axes: Any, engine: Engine, prompt: list[int], num_new: int, budget: int) -> str:
    """Draws and prints a text, each token in the color of the stage that guessed it."""
    end = engine.complete(
        prompt,
        sampling=WARM,
        speculation=speculation("triforce", budget),
        seed=1,
        generation=GenerationConfig(num_new, ignore_eos=True),
    )
    tokens = end.tokens
    print("".join(map(colored, tokens)))
    print(LEGEND)
    x = y = 0
    letters: dict[str, Any] = {"fontsize": 8.2, "transform": axes.transAxes}
    for token in tokens:
        word = "".join(letter if letter.isprintable() else " " for letter in token.text)
        if x + len(word) > WIDTH:
            x, y = 0, y + 1
        if y < LINES:
            axes.text(
                x / WIDTH,
                1 - (y + 0.8) / LINES,
                word,
                color=COLORS[token.origin],
                **letters,
                family="monospace",
            )
        x += len(word)
    axes.axis("off")
    axes.set_title("3  who guessed which token", loc="left")
    used = [name for name in MEANINGS if any(token.origin == name for token in tokens)]
    for number, name in enumerate(used):
        color = COLORS[name]
        axes.text(number / len(used), -0.1, MEANINGS[name], color=color, **letters, weight="bold")
    share = sum(token.origin not in ("recovered", "bonus") for token in tokens) / len(tokens)
    target = end.stats.stages[-1]
    return (
        f"{share:.0%} of {len(tokens)} tokens were guessed; the target accepted "
        f"{target.acceptance_rate or 0:.0%} of what it was proposed and ran "
        f"{target.num_rounds} times for them."
    )


def draw_speed(axes: Any, engine: Engine, prompt: list[int], num_new: int) -> str:
    """Draws milliseconds per token after several lengths; the longest is read first, once."""
    lengths = [n for n in (len(prompt) >> 3, len(prompt) >> 2, len(prompt) >> 1, len(prompt)) if n]
    times: dict[str, list[float]] = {"autoregressive": [], "retrieval": [], "triforce": []}
    generation = GenerationConfig(num_new, ignore_eos=True)
    settings: dict[str, Any] = {"sampling": WARM, "generation": generation}
    for length in reversed(lengths):
        for method, found in times.items():
            budget = max(CHUNK, min(1024, length // 4 // CHUNK * CHUNK))
            how = settings | {"speculation": speculation(method, budget)}
            seconds = []
            for seed in range(3):
                end = engine.complete(prompt[:length], seed=seed, **how)
                seconds.append(end.stats.ms_per_token or 0.0)
            found.insert(0, statistics.median(seconds))
    colors = ("#000000", "#56B4E9", "#009E73")
    for (method, found), color in zip(times.items(), colors, strict=True):
        axes.plot(lengths, found, color=color, marker="o", markersize=4, label=method)
    axes.set(xlabel="text, tokens", ylim=(0, None))
    axes.set_title("4  milliseconds per token", loc="left")
    axes.legend(frameon=False, fontsize=8)
    plain, best = times["autoregressive"][-1], min(times["retrieval"][-1], times["triforce"][-1])
    return (
        f"After {lengths[-1]} tokens a token takes {plain:.1f} ms by the target alone and "
        f"{best:.1f} ms with guesses, {plain / best:.2f} times as fast; after {lengths[0]} "
        f"tokens {times['autoregressive'][0]:.1f} ms and "
        f"{min(times['retrieval'][0], times['triforce'][0]):.1f} ms."
    )


def draw(engine: Engine, prompt: list[int], num_new: int, out: Path) -> None:
    """Draws all four pictures; prints a sentence about each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    (mass, choice), (text, speed) = figure.subplots(2, 2)
    with torch.inference_mode():
        reading = read(engine, prompt)
        budget = SpeculationConfig().budget_for(len(prompt))
        print("1.", draw_mass(mass, reading), flush=True)
        print("2.", draw_choice(choice, reading, budget), flush=True)
    print("3.", draw_text(text, engine, prompt, num_new, budget), flush=True)
    print("4.", draw_speed(speed, engine, prompt, num_new), flush=True)
    for axes in (mass, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font does not have
        figure.savefig(out, dpi=110)
    print(f"drawn: {out}")


def run_command(args: argparse.Namespace) -> None:
    engine, [prompt] = load_engine(args, read_prompt(args.prompt_file, args.prompt))
    if len(prompt) < 4 * (SHIFT + WINDOW):
        raise InputError(
            f"the text has {len(prompt)} tokens, too few to see anything; give at least "
            f"{4 * (SHIFT + WINDOW)}"
        )
    draw(engine, prompt, args.max_new_tokens, args.out)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
