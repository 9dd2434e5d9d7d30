"""Every method on the same prompts in one run: `python -m minitri.bench --compare`.

A prompt is read once; every method gets a copy of the cache. Then the methods take turns, a burst of tokens each, round
after round, so that a machine whose speed drifts is as slow for one as for the other. A speedup is autoregressive
milliseconds per token over those of the method, of one prompt and one seed; medians and ranges are taken over these.
End to end means prefill and decoding together. At temperature 0, or coupled, all methods should write the same text, so
that none has better luck; then it is counted how much of it is the same. With `--peers` other programs take their
turns, too (`peers.py`).

Nothing here knows how a method works.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.assembly import build_cascade
from minitri.caches import FullCache
from minitri.engine import Engine
from minitri.errors import InputError
from minitri.gpu.graphs import graph_pool
from minitri.runner import prefill, synchronize
from minitri.readers import Readers, allocate_full_cache, check_offload
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding.stats import Stats, spread

log = logging.getLogger("minitri")

BASELINE = "autoregressive"


def check_on_chip(generation: GenerationConfig) -> None:
    """Raises `InputError` if the methods could end up with different numbers of layers on the GPU."""
    if generation.offload and generation.on_chip is None:
        raise InputError(
            "--compare --offload needs --on-chip N, so that all methods keep as many layers on the GPU"
        )


class Method:
    """One of our methods behind a prompt that has been read."""

    def __init__(
        self,
        engine: Engine,
        full: FullCache,
        prompt: list[int],
        speculation: SpeculationConfig,
        sampling: SamplingParams,
        seed: int,
        num_new: int,
        queries_LTHD: Tensor,
        generation: GenerationConfig,
    ) -> None:
        """`full` holds the prompt but for its last token, and is copied; the queries are those of its last tokens.
        `generation` says where the copy is to be."""
        model = engine.model
        capacity = len(prompt) + num_new + speculation.max_block
        self.stats = Stats(num_prompt_tokens=len(prompt))
        own = allocate_full_cache(
            model, engine.draft, [len(prompt)], capacity, generation, speculation
        )
        own.adopt(full)
        graphs = graph_pool(model.device, wanted=generation.cuda_graphs)
        readers = Readers(model, engine.draft, own, [len(prompt)], sampling, speculation, graphs)
        self._cascade = build_cascade(readers, [list(prompt)], [seed], self.stats)
        if (small := readers.small) is not None:
            if small.max_prompt_queries is None:
                raise InputError(
                    f"--policy {speculation.policy} must watch the prompt being read; compare another one"
                )
            small.observe(0, queries_LTHD)
        started = time.perf_counter()
        self._cascade.start()
        self.start_seconds = time.perf_counter() - started

    def burst(self, num_tokens: int) -> int:
        """Decodes at least so many tokens; returns how many."""
        before = len(self._cascade.sequences[0])
        while len(self._cascade.sequences[0]) - before < num_tokens:
            self._cascade.step()
        return len(self._cascade.sequences[0]) - before

    @property
    def text(self) -> list[int]:
        """All tokens it has written."""
        return self._cascade.sequences[0][self.stats.num_prompt_tokens :]


class Peer:
    """Another program, as an iterator over the tokens it makes; the first one follows its prefill."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens
        next(tokens)

    def burst(self, num_tokens: int) -> int:
        """Decodes so many tokens."""
        for _ in range(num_tokens):
            next(self._tokens)
        return num_tokens


@dataclass
class Score:
    """What one contestant did, an entry per prompt and seed."""

    ms_per_token: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per level, from the lowest upwards: accepted and tested guesses of the stage below it, all runs together."""
    num_same: list[int] = field(default_factory=list)
    """Tokens before the first that differs from the baseline's, where all methods should write the same text."""
    plans: dict[str, int] = field(default_factory=dict)
    """Steps per plan, where there was a choice."""


@torch.inference_mode()
def read_prompt_once(
    engine: Engine, prompt: list[int], max_queries: int, chunk: int = 1024
) -> tuple[FullCache, Tensor, float]:
    """A full cache that holds the prompt but for its last token, the queries (L, T, H, D) of the last tokens in it, at
    most `max_queries`, and the seconds it took."""
    model = engine.model
    full = FullCache.allocate(model.config, 1, len(prompt), dtype=model.dtype, device=model.device)
    shape = (model.config.num_layers, 0, model.config.num_heads, model.config.head_dim)
    latest = [torch.empty(shape, dtype=model.dtype, device=model.device)]

    def watch(queries_LTHD: Tensor) -> None:
        latest[0] = torch.cat((latest[0], queries_LTHD), 1)[:, -max_queries:]

    synchronize(model.device)
    started = time.perf_counter()
    for _ in prefill(model, prompt, full, 0, chunk=chunk, watch=watch, max_queries=max_queries):
        pass
    synchronize(model.device)
    return full, latest[0], time.perf_counter() - started


@torch.inference_mode()
def compare(
    engine: Engine,
    prompts: Sequence[list[int]],
    speculations: dict[str, SpeculationConfig],
    *,
    sampling: SamplingParams,
    seeds: Sequence[int],
    generation: GenerationConfig,
    burst: int = 8,
    peers: dict[str, Callable[[list[int], int], Iterator[int]]] | None = None,
) -> dict[str, Score]:
    """Lets every method decode `generation.max_new_tokens` behind every prompt, for every seed; peers beside the first
    seed only. With `generation.offload` the prompt is read on the device all the same.

    Progress goes to the log.
    """
    peers, num_new = peers or {}, generation.max_new_tokens
    check_offload(engine.model, generation)
    check_on_chip(generation)
    scores = {name: Score() for name in (*speculations, *peers)}
    window = max(speculation.observation_window for speculation in speculations.values())
    for prompt in prompts:
        engine.check_prompt(prompt, num_new + 2 * burst)
    for number, prompt in enumerate(prompts):
        full, queries_LTHD, prefill_seconds = read_prompt_once(engine, prompt, window)
        log.info(
            "prompt %d of %d: %d tokens read in %.1f s",
            number + 1,
            len(prompts),
            len(prompt),
            prefill_seconds,
        )
        started_peers = {}
        for name, peer in peers.items():
            tokens = peer(prompt, num_new + 2 * burst)
            started = time.perf_counter()
            started_peers[name] = Peer(tokens)
            scores[name].prefill_seconds.append(time.perf_counter() - started)
            log.info("  %s has read it in %.1f s", name, scores[name].prefill_seconds[-1])
        for seed in seeds:
            ours = {
                name: Method(
                    engine,
                    full,
                    prompt,
                    speculation,
                    sampling,
                    seed,
                    num_new + 2 * burst,
                    queries_LTHD,
                    generation,
                )
                for name, speculation in speculations.items()
            }
            contestants = {**ours, **(started_peers if seed == seeds[0] else {})}
            for name, ms in take_turns(contestants, num_new, burst).items():
                scores[name].ms_per_token.append(ms)
            for name, method in ours.items():
                if sampling.temperature == 0 or speculations[name].coupled:
                    scores[name].num_same.append(
                        num_same(method.text, ours[BASELINE].text, num_new)
                    )
                scores[name].prefill_seconds.append(prefill_seconds + method.start_seconds)
                for level in method.stats.levels:
                    accepted, tested = scores[name].guesses.get(level.name, (0, 0))
                    accepted, tested = (
                        accepted + level.num_accepted_tokens,
                        tested + level.num_tested_tokens,
                    )
                    scores[name].guesses[level.name] = accepted, tested
                for plan, steps in method.stats.steps_per_plan.items():
                    scores[name].plans[plan] = scores[name].plans.get(plan, 0) + steps
            line = ", ".join(f"{name} {scores[name].ms_per_token[-1]:.1f}" for name in contestants)
            log.info("  seed %d, ms/token: %s", seed, line)
    return scores


def num_same(tokens: list[int], others: list[int], num_tokens: int) -> int:
    """Tokens that two texts have in common, from the first on, of the first `num_tokens`."""
    pairs = zip(tokens[:num_tokens], others[:num_tokens], strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), num_tokens)


def take_turns(contestants: dict[str, Any], num_new: int, burst: int) -> dict[str, float]:
    """Milliseconds per token of each; the order of the turns changes from round to round."""
    tokens, seconds = dict.fromkeys(contestants, 0), dict.fromkeys(contestants, 0.0)
    order = list(contestants)
    while any(count < num_new for count in tokens.values()):
        for name in order:
            if tokens[name] < num_new:
                started = time.perf_counter()
                tokens[name] += contestants[name].burst(min(burst, num_new - tokens[name]))
                seconds[name] += time.perf_counter() - started
        order.append(order.pop(0))
    return {name: 1e3 * seconds[name] / tokens[name] for name in contestants}


def summarise(scores: dict[str, Score], num_new: int) -> dict[str, dict[str, Any]]:
    """Medians and ranges, with speedups over the baseline prompt by prompt and seed by seed."""
    baseline = scores[BASELINE]
    totals = [
        s + 1e-3 * num_new * ms
        for s, ms in zip(baseline.prefill_seconds, baseline.ms_per_token, strict=True)
    ]
    result = {}
    for name, score in scores.items():
        # Peers run once per prompt, beside the first seed.
        every = len(baseline.ms_per_token) // len(score.ms_per_token)
        alone, alone_total = baseline.ms_per_token[::every], totals[::every]
        own_totals = [
            s + 1e-3 * num_new * ms
            for s, ms in zip(score.prefill_seconds, score.ms_per_token, strict=True)
        ]
        result[name] = {
            "ms_per_token": spread(score.ms_per_token),
            "speedup": spread([a / b for a, b in zip(alone, score.ms_per_token, strict=True)]),
            "prefill_seconds": spread(score.prefill_seconds),
            "end_to_end_seconds": spread(own_totals),
            "end_to_end_speedup": spread(
                [a / b for a, b in zip(alone_total, own_totals, strict=True)]
            ),
            "acceptance": {
                level: a / tested for level, (a, tested) in score.guesses.items() if tested
            },
            "same_tokens": score.num_same,
            "steps_per_plan": score.plans,
        }
    return result


def table(result: dict[str, dict[str, Any]], num_new: int) -> str:
    """The result for people; `num_new` tokens were asked for."""
    lines = [
        f"{'':24s} {'ms/token':>22s} {'speedup':>22s} {'accepted':>11s} {'prefill, s':>10s} {'end to end, s':>14s} "
        f"{'speedup':>8s}"
    ]
    for name, row in result.items():
        ms, speedup = (
            f"{row[key]['median']:.{digits}f} ({row[key]['min']:.{digits}f} to {row[key]['max']:.{digits}f})"
            for key, digits in (("ms_per_token", 1), ("speedup", 2))
        )
        accepted = " ".join(f"{rate:.3f}" for rate in row["acceptance"].values())
        lines.append(
            f"{name:24s} {ms:>22s} {speedup:>22s} {accepted:>11s} "
            f"{row['prefill_seconds']['median']:10.1f} {row['end_to_end_seconds']['median']:14.1f} "
            f"{row['end_to_end_speedup']['median']:8.2f}"
        )
        if row["same_tokens"] and name != BASELINE:
            counts = ", ".join(map(str, row["same_tokens"]))
            lines.append(f"{'':24s} the text of {BASELINE} for {counts} of {num_new} tokens")
        if len(row["steps_per_plan"]) > 1:
            used = sorted(row["steps_per_plan"].items(), key=lambda item: -item[1])
            lines.append(
                f"{'':24s} chose " + ", ".join(f"{plan}: {steps}" for plan, steps in used[:4])
            )
    return "\n".join(lines)


def plotter(file: Path, draw: Callable[..., None]) -> Callable[..., None]:
    """`draw` for a PNG of this name. Raises `InputError` if that will not work, at once."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            "--plot needs matplotlib; install it with: pip install matplotlib"
        ) from None
    if file.suffix != ".png" or not file.parent.is_dir():
        raise InputError(
            f"--plot {file} is not a .png file in a folder that is there; write for example speed.png"
        )
    matplotlib.use("agg")
    return functools.partial(draw, file)


def draw_speedups(file: Path, result: dict[str, dict[str, Any]], title: str) -> None:
    """The speedups as bars."""
    from matplotlib import pyplot

    names = list(result)
    medians = [result[name]["speedup"]["median"] for name in names]
    below = [
        median - result[name]["speedup"]["min"] for name, median in zip(names, medians, strict=True)
    ]
    above = [
        result[name]["speedup"]["max"] - median for name, median in zip(names, medians, strict=True)
    ]
    figure, axes = pyplot.subplots(figsize=(1.6 + len(names), 4))
    bars = axes.bar(names, medians, yerr=(below, above), capsize=4)
    axes.bar_label(bars, fmt="%.2f", label_type="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel(f"decoding speed, {BASELINE} = 1")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=20)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
