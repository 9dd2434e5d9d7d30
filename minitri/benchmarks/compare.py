"""Every method on the same prompts in one run: `python -m minitri.bench --compare`.

A prompt is read once; every method gets a copy of the cache. Then the methods take turns, a burst
of tokens each, round after round, so that a machine whose speed drifts is as slow for one as for
the other. A speedup is autoregressive milliseconds per token over those of the method, of one
prompt and one seed; medians and ranges are taken over these. End to end means prefill and decoding
together. At temperature 0, or coupled, all methods should write the same text, and what is the same
is counted. With `--peers` other programs take their turns (`peers/`).
"""

import dataclasses
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minitri.benchmarks.peers import StartPeer
from minitri.caches.full import FullCache
from minitri.engine import Engine
from minitri.errors import InputError
from minitri.gpu.placement import check_offload
from minitri.gpu.streams import synchronize
from minitri.loading.prompts import check_prompt
from minitri.requests import Request
from minitri.runner import prefill
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.stack import begin

log = logging.getLogger("minitri")

REFERENCE = "autoregressive"
BURST = 32
"""Tokens that a contestant decodes in a turn."""
SETTLE_SECONDS = 0.02
"""Pause before a turn: for 5 to 10 ms OpenMP's threads go on spinning behind the last one's."""
SLACK = 2 * BURST
"""Tokens of room behind those that are asked for: a last burst may be longer."""


class Method:
    """One of our methods behind a prompt that has been read."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        speculation: SpeculationConfig,
        full: FullCache,
        queries_LTHD: Tensor,
    ) -> None:
        """`full` holds the prompt but for its last token, and is copied; the queries are those of
        its last tokens."""
        stack = begin(engine.models, [request], speculation)
        stack.memory.full.copy_from(full)
        if (cache := stack.memory.retrieval_cache) is not None:
            if cache.max_prompt_queries is None:
                raise InputError(
                    f"--policy {speculation.policy} must watch the prompt being read; "
                    "compare another one"
                )
            cache.observe(0, queries_LTHD)
        self.stats, self._cascade, self._stack = stack.stats, stack.cascade, stack
        self._num_prompt = len(request.prompt)
        self.should_repeat = request.sampling.temperature == 0 or speculation.coupled
        """Whether its text should be that of every other method."""
        started = time.perf_counter()
        self._cascade.start()
        self.start_seconds = time.perf_counter() - started

    @property
    def text(self) -> list[int]:
        """All tokens it has written."""
        return self._cascade.sequences[0][self._num_prompt :]

    def burst(self, num_tokens: int) -> int:
        """Decodes at least so many tokens; returns how many."""
        before = len(self.text)
        while len(self.text) - before < num_tokens:
            self._stack.step()
        return len(self.text) - before


class Peer:
    """Another program, as an iterator over its tokens; the first one follows its prefill."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens
        self.text: list[int] = []
        """All tokens it has written."""
        started = time.perf_counter()
        self.burst(1)
        self.prefill_seconds = time.perf_counter() - started

    def burst(self, num_tokens: int) -> int:
        """See `Method.burst`."""
        self.text += [next(self._tokens) for _ in range(num_tokens)]
        return num_tokens


Contestant = Method | Peer


@dataclass
class Score:
    """What one contestant did, an entry per prompt and seed."""

    ms_per_token: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per level, from the lowest upwards: accepted and tested guesses in all runs together."""
    num_same: list[int] = field(default_factory=list)
    """Tokens before the first that differs from the reference's, where none should."""
    plans: Counter[str] = field(default_factory=Counter)
    """Steps per plan."""
    num_tokens: int = 0
    """Tokens of these steps."""

    def add(self, method: Method, prefill_seconds: float, reference: list[int]) -> None:
        """Counts a run of one of our methods; `prefill_seconds` are without the first token."""
        if method.should_repeat:
            self.num_same.append(num_same(method.text, reference, len(reference)))
        self.prefill_seconds.append(prefill_seconds + method.start_seconds)
        for level in method.stats.levels:
            accepted, tested = self.guesses.get(level.name, (0, 0))
            accepted += level.num_accepted_tokens
            self.guesses[level.name] = accepted, tested + level.num_tested_tokens
        self.plans.update(method.stats.steps_per_plan)
        self.num_tokens += len(method.text) - 1  # the first came with the prefill

    def end_to_end(self, num_new: int) -> list[float]:
        """Seconds of prefill and of decoding `num_new` tokens."""
        pairs = zip(self.prefill_seconds, self.ms_per_token, strict=True)
        return [seconds + 1e-3 * num_new * ms for seconds, ms in pairs]


@torch.inference_mode()
def read_prompt_once(
    engine: Engine, prompt: list[int], max_queries: int, chunk: int = 1024
) -> tuple[FullCache, Tensor, float]:
    """Reads a prompt but for its last token; returns the full cache, the queries (L, T, H, D) of
    its last tokens, at most `max_queries`, and the seconds it took."""
    model = engine.model
    full = FullCache.allocate(model.config, 1, len(prompt), dtype=model.dtype, device=model.device)
    shape = (model.config.num_layers, 0, model.config.num_heads, model.config.head_dim)
    latest_LTHD = torch.empty(shape, dtype=model.dtype, device=model.device)

    def watch(queries_LTHD: Tensor) -> None:
        nonlocal latest_LTHD
        latest_LTHD = torch.cat((latest_LTHD, queries_LTHD), 1)[:, -max_queries:]

    synchronize(model.device)
    started = time.perf_counter()
    for _ in prefill(model, prompt, full, 0, chunk=chunk, watch=watch, max_queries=max_queries):
        pass
    synchronize(model.device)
    return full, latest_LTHD, time.perf_counter() - started


def check_on_chip(generation: GenerationConfig) -> None:
    """Raises `InputError` if methods could keep different numbers of layers on the GPU."""
    if generation.offload and generation.on_chip is None:
        raise InputError(
            "--compare --offload needs --on-chip N, so that all methods keep as many layers on the "
            "GPU"
        )


@torch.inference_mode()
def compare(
    engine: Engine, prompts: Sequence[list[int]], speculations: dict[str, SpeculationConfig], *,
    sampling: SamplingParams, seeds: Sequence[int], generation: GenerationConfig,
    peers: dict[str, StartPeer],
) -> dict[str, Score]:  # fmt: skip
    """Lets every method decode `generation.max_new_tokens` behind every prompt, for every seed.

    Peers run once per prompt, beside the first seed. With `generation.offload` the prompt is read
    on the device all the same. Progress goes to the log.
    """
    num_new = generation.max_new_tokens
    check_offload(engine.model, generation)
    room = dataclasses.replace(generation, max_new_tokens=num_new + SLACK)
    for prompt in prompts:
        check_prompt(prompt, engine.config, room.max_new_tokens)
    scores = {name: Score() for name in (*speculations, *peers)}
    window = max(speculation.observation_window for speculation in speculations.values())
    for number, prompt in enumerate(prompts, 1):
        full, queries_LTHD, seconds = read_prompt_once(engine, prompt, window)
        progress = number, len(prompts), len(prompt), seconds
        log.info("prompt %d of %d: %d tokens read in %.1f s", *progress)
        others = {name: Peer(peer(prompt, room.max_new_tokens)) for name, peer in peers.items()}
        for name in others:
            scores[name].prefill_seconds.append(others[name].prefill_seconds)
            log.info("  %s has read it in %.1f s", name, others[name].prefill_seconds)
        for seed in seeds:
            methods = {}
            for name, speculation in speculations.items():
                request = Request(prompt, seed, sampling, room)
                methods[name] = Method(engine, request, speculation, full, queries_LTHD)
            times = take_turns({**methods, **others}, num_new, BURST)
            reference = methods[REFERENCE].text[:num_new]
            for name, ms in times.items():
                scores[name].ms_per_token.append(ms)
                if name in methods:
                    scores[name].add(methods[name], seconds, reference)
                elif sampling.temperature == 0:  # peers are greedy, and round in their own ways
                    scores[name].num_same.append(num_same(others[name].text, reference, num_new))
            line = ", ".join(f"{name} {ms:.1f}" for name, ms in times.items())
            log.info("  seed %d, ms/token: %s", seed, line)
            others = {}
            del methods  # gives up their memory for the next ones
    return scores


def num_same(tokens: list[int], others: list[int], num_tokens: int) -> int:
    """Tokens that two texts have in common, from the first on, of the first `num_tokens`."""
    pairs = zip(tokens[:num_tokens], others[:num_tokens], strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), num_tokens)


def take_turns(contestants: Mapping[str, Contestant], num_new: int, burst: int) -> dict[str, float]:
    """Milliseconds per token of each; the order of the turns changes from round to round."""
    tokens, seconds = dict.fromkeys(contestants, 0), dict.fromkeys(contestants, 0.0)
    order = list(contestants)
    while any(count < num_new for count in tokens.values()):
        for name in order:
            if tokens[name] < num_new:
                time.sleep(SETTLE_SECONDS)
                started = time.perf_counter()
                tokens[name] += contestants[name].burst(min(burst, num_new - tokens[name]))
                seconds[name] += time.perf_counter() - started
        order.append(order.pop(0))
    return {name: 1e3 * seconds[name] / tokens[name] for name in contestants}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(scores: dict[str, Score], num_new: int) -> dict[str, dict[str, Any]]:
    """Medians and ranges, with speedups over the reference prompt by prompt and seed by seed."""

    def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
        every = len(ours) // len(theirs)  # a peer runs once per prompt, beside the first seed
        return spread([a / b for a, b in zip(ours[::every], theirs, strict=True)])

    reference = scores[REFERENCE]
    return {
        name: {
            "ms_per_token": spread(score.ms_per_token),
            "speedup": ratios(reference.ms_per_token, score.ms_per_token),
            "prefill_seconds": spread(score.prefill_seconds),
            "end_to_end_seconds": spread(score.end_to_end(num_new)),
            "end_to_end_speedup": ratios(reference.end_to_end(num_new), score.end_to_end(num_new)),
            "acceptance": {level: a / n for level, (a, n) in score.guesses.items() if n},
            "tokens_per_step": score.num_tokens / max(score.plans.total(), 1),
            "same_tokens": score.num_same,
            "steps_per_plan": score.plans,
        }
        for name, score in scores.items()
    }


def table(result: dict[str, dict[str, Any]], num_new: int) -> str:
    """The result for people; `num_new` tokens were asked for."""
    lines = [
        f"{'':24s} {'ms/token':>22s} {'speedup':>22s} {'a step':>6s} {'accepted':>11s} "
        f"{'prefill, s':>10s} {'end to end, s':>14s} {'speedup':>8s}"
    ]
    for name, row in result.items():
        ms = "{median:.1f} ({min:.1f} to {max:.1f})".format(**row["ms_per_token"])
        speedup = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["speedup"])
        accepted = " ".join(f"{rate:.3f}" for rate in row["acceptance"].values())
        keys = ("prefill_seconds", "end_to_end_seconds", "end_to_end_speedup")
        prefill, end_to_end, ratio = (row[key]["median"] for key in keys)
        a_step = f"{row['tokens_per_step']:.2f}" if row["tokens_per_step"] else ""
        lines.append(
            f"{name:24s} {ms:>22s} {speedup:>22s} {a_step:>6s} {accepted:>11s} {prefill:10.1f} "
            f"{end_to_end:14.1f} {ratio:8.2f}"
        )
        if row["same_tokens"] and name != REFERENCE:
            counts = ", ".join(map(str, row["same_tokens"]))
            lines.append(f"{'':24s} the text of {REFERENCE} for {counts} of {num_new} tokens")
        if len(row["steps_per_plan"]) > 1:
            most_used = row["steps_per_plan"].most_common(4)
            lines.append(f"{'':24s} plans: " + ", ".join(f"{plan}: {n}" for plan, n in most_used))
    return "\n".join(lines)
