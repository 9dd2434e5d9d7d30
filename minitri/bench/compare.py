"""Methods on the same prompts in one run: what `python -m minitri.bench` measures.

A prompt is read once; every method begins with a copy of its K and V. Then the methods take turns,
a burst of tokens each, round after round, so that a machine whose speed drifts is as slow for one
as for the other. A speedup is milliseconds per token of the first method over those of another, of
one prompt and one seed; medians and ranges are taken over these. End to end means prefill and
decoding together. At temperature 0, or coupled, all methods should write the same text, and what is
the same is counted. Other programs may take their turns, too: those of `tools/bench`.
"""

import dataclasses
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minitri.caches.prefixes import PrefixCache
from minitri.engine import Engine
from minitri.gpu.allocation import check_offload
from minitri.gpu.streams import synchronize
from minitri.loading.prompt_ids import check_prompt
from minitri.requests import Request
from minitri.settings import SpeculationConfig
from minitri.stack import Stack, begin
from minitri.stats import Stats

log = logging.getLogger("minitri")

BURST = 32
"""Tokens that a contestant decodes in a turn."""
SETTLE_SECONDS = 0.02
"""Pause before a turn: OpenMP's threads go on spinning for 5 to 10 ms after the last one's."""
SLACK = 2 * BURST
"""Tokens of room after those that are asked for: a last burst may be longer."""

StartPeer = Callable[[list[int], int], Iterator[int]]
"""Another program: continues a prompt by some number of tokens, one at a time; the first follows
the prefill. What is loaded for it is loaded before it returns."""
Result = dict[str, dict[str, Any]]
"""Figures of every contestant, by its name."""


class Contestant:
    """A method or another program, decoding after one prompt with one seed."""

    def __init__(
        self,
        blocks: Iterator[list[int]],
        *,
        read_seconds: float = 0.0,
        should_repeat: bool,
        stats: Stats | None = None,
    ) -> None:
        """`blocks` are the tokens of its steps; `read_seconds` the time of what comes before."""
        self._blocks, self.stats = blocks, stats
        self.should_repeat = should_repeat
        """Whether its text should be that of every other contestant."""
        self.text: list[int] = []
        """All tokens it has written."""
        started = time.perf_counter()
        self.burst(1)
        self.prefill_seconds = read_seconds + time.perf_counter() - started
        self.num_first = len(self.text)
        self.decode_seconds = 0.0

    def burst(self, num_tokens: int) -> None:
        """Decodes at least this number of tokens."""
        wanted = len(self.text) + num_tokens
        while len(self.text) < wanted:
            self.text += next(self._blocks)

    def end(self) -> None:
        """Gives up its memory."""
        self._blocks = iter(())

    @property
    def num_decoded(self) -> int:
        """Tokens after those of the prefill."""
        return len(self.text) - self.num_first

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.decode_seconds / self.num_decoded

    def end_to_end(self, num_new: int) -> float:
        """Seconds of prefill and of decoding `num_new` tokens."""
        return self.prefill_seconds + 1e-3 * num_new * self.ms_per_token


def read_once(engine: Engine, request: Request) -> tuple[PrefixCache, float]:
    """What holds the K and V of a prompt but for its last token, and the seconds it took."""
    generation = dataclasses.replace(
        request.generation, max_new_tokens=1, offload=False, on_chip=None, cuda_graphs=False
    )
    request = dataclasses.replace(request, generation=generation)
    stack = begin(engine.models, [request], SpeculationConfig("autoregressive"))
    synchronize(engine.model.device)
    started = time.perf_counter()
    for _ in stack.prefill(0):
        pass
    synchronize(engine.model.device)
    seconds = time.perf_counter() - started
    stack.retire(0)
    return stack.memory.prefix, seconds


def start_method(
    engine: Engine,
    request: Request,
    speculation: SpeculationConfig,
    read: PrefixCache,
    read_seconds: float,
) -> Contestant:
    """One of our methods after a prompt that `read` holds."""
    stack = begin(engine.models, [request], speculation, held=read)
    stack.reuse(0)
    for _ in stack.prefill(0):  # what the retrieval cache has to observe
        pass
    return Contestant(
        steps(stack),
        read_seconds=read_seconds,
        should_repeat=request.sampling.temperature == 0 or speculation.coupled,
        stats=stack.stats,
    )


def steps(stack: Stack) -> Iterator[list[int]]:
    """The tokens of the first row, step by step, without an end."""
    yield stack.start([0])[0].tokens
    while True:
        yield stack.step()[0].tokens


@torch.inference_mode()
def compare(
    engine: Engine,
    requests: Sequence[Request],
    seeds: Sequence[int],
    speculations: dict[str, SpeculationConfig],
    peers: dict[str, StartPeer],
) -> dict[str, list[Contestant]]:
    """Lets every method decode after every prompt, which are token ids, for every seed; returns who
    has decoded, by name.

    Peers run once per prompt, with the first seed, and greedily. With `offload` the prompt is read
    on the device all the same. Progress goes to the log.
    """
    done: dict[str, list[Contestant]] = {name: [] for name in (*speculations, *peers)}
    for given in requests:
        check_offload(engine.model, given.generation)
        num_new = given.generation.max_new_tokens
        prompt = [int(token) for token in given.prompt]
        check_prompt(prompt, engine.config, num_new + SLACK)
        room = dataclasses.replace(given.generation, max_new_tokens=num_new + SLACK)
        request = dataclasses.replace(given, generation=room)
        read, seconds = read_once(engine, request)
        log.info("%d tokens read in %.1f s", len(prompt), seconds)
        running = {}
        for name, start in peers.items():
            blocks = ([token] for token in start(prompt, num_new + SLACK))
            running[name] = Contestant(blocks, should_repeat=given.sampling.temperature == 0)
            log.info("  %s has read it in %.1f s", name, running[name].prefill_seconds)
        for seed in seeds:
            request = dataclasses.replace(request, seed=seed)
            for name, speculation in speculations.items():
                running[name] = start_method(engine, request, speculation, read, seconds)
            take_turns(list(running.values()), num_new)
            times = (f"{name} {it.ms_per_token:.1f}" for name, it in running.items())
            log.info("  seed %d, ms/token: %s", seed, ", ".join(times))
            for name, it in running.items():
                it.end()
                done[name].append(it)
            running = {}
    return done


def take_turns(contestants: list[Contestant], num_new: int, burst: int = BURST) -> None:
    """Lets all decode `num_new` tokens; the order of the turns changes from round to round."""
    while any(it.num_decoded < num_new for it in contestants):
        for it in contestants:
            if it.num_decoded < num_new:
                time.sleep(SETTLE_SECONDS)
                started = time.perf_counter()
                it.burst(min(burst, num_new - it.num_decoded))
                it.decode_seconds += time.perf_counter() - started
        contestants.append(contestants.pop(0))


def num_same(tokens: list[int], others: list[int], num_tokens: int) -> int:
    """Tokens that two texts have in common, from the first on, of the first `num_tokens`."""
    pairs = zip(tokens[:num_tokens], others[:num_tokens], strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), num_tokens)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(done: dict[str, list[Contestant]], num_new: int) -> Result:
    """Medians and ranges, with speedups over the first method prompt by prompt and seed by seed."""
    result = {}
    first = next(iter(done.values()))
    for name, own in done.items():
        reference = first[:: len(first) // len(own)]  # a peer runs with the first seed only
        pairs = list(zip(reference, own, strict=True))
        all_stats = [it.stats for it in own if it.stats is not None]
        plans = sum((Counter(stats.steps_per_plan) for stats in all_stats), Counter())
        accepted: Counter[str] = Counter()
        tested: Counter[str] = Counter()
        for level in (level for stats in all_stats for level in stats.levels):
            accepted[level.name] += level.num_accepted_tokens
            tested[level.name] += level.num_tested_tokens
        ratios = [one.end_to_end(num_new) / it.end_to_end(num_new) for one, it in pairs]
        result[name] = {
            "ms_per_token": spread([it.ms_per_token for it in own]),
            "speedup": spread([one.ms_per_token / it.ms_per_token for one, it in pairs]),
            "prefill_seconds": spread([it.prefill_seconds for it in own]),
            "end_to_end_seconds": spread([it.end_to_end(num_new) for it in own]),
            "end_to_end_speedup": spread(ratios),
            "acceptance": {level: accepted[level] / n for level, n in tested.items() if n},
            "tokens_per_step": sum(it.num_decoded for it in own) / max(plans.total(), 1),
            "same_tokens": [
                num_same(it.text, one.text, num_new) for one, it in pairs if it.should_repeat
            ],
            "steps_per_plan": plans,
        }
    return result


def table(result: Result, num_new: int) -> str:
    """The result for people; `num_new` tokens were asked for."""
    lines = [
        f"{'':24s} {'ms/token':>22s} {'speedup':>22s} {'a step':>6s} {'accepted':>11s} "
        f"{'prefill, s':>10s} {'end to end, s':>14s} {'speedup':>8s}"
    ]
    reference = next(iter(result))
    for name, row in result.items():
        ms = "{median:.1f} ({min:.1f} to {max:.1f})".format(**row["ms_per_token"])
        speedup = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["speedup"])
        accepted = " ".join(f"{rate:.3f}" for rate in row["acceptance"].values())
        keys = ("prefill_seconds", "end_to_end_seconds", "end_to_end_speedup")
        prefill, end_to_end, ratio = (row[key]["median"] for key in keys)
        a_step = f"{row['tokens_per_step']:.2f}" if row["steps_per_plan"] else ""
        lines.append(
            f"{name:24s} {ms:>22s} {speedup:>22s} {a_step:>6s} {accepted:>11s} {prefill:10.1f} "
            f"{end_to_end:14.1f} {ratio:8.2f}"
        )
        if row["same_tokens"] and name != reference:
            counts = ", ".join(map(str, row["same_tokens"]))
            lines.append(f"{'':24s} the text of {reference} for {counts} of {num_new} tokens")
        if len(row["steps_per_plan"]) > 1:
            most_used = row["steps_per_plan"].most_common(4)
            lines.append(f"{'':24s} plans: " + ", ".join(f"{plan}: {n}" for plan, n in most_used))
    return "\n".join(lines)
