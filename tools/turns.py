"""One prompt, read once, behind which several cascades take turns: for comparisons in which the prefill is the same.

A tool, not a part of the engine: `Engine.generate` reads every prompt itself.
"""

from __future__ import annotations

import sys
import time

import torch

from minitri.assembly import build_cascade
from minitri.caches import FullCache
from minitri.engine import Engine
from minitri.reader import read_block
from minitri.settings import SamplingParams, SpeculationConfig
from minitri.stats import Stats


@torch.inference_mode()
def take_turns(
    engine: Engine,
    prompt: list[int],
    speculations: list[SpeculationConfig],
    *,
    sampling: SamplingParams,
    num_new: int,
    seed: int = 0,
    chunk: int = 1024,
) -> list[Stats]:
    """Statistics of `num_new` tokens behind the prompt with each of the settings, one after the other.

    End-of-sequence tokens do not end anything. The first token of each turn counts as prefill, as in the engine.
    """
    model = engine.model
    capacity = len(prompt) + num_new + max(speculation.max_block for speculation in speculations)
    full = FullCache.allocate(model.config, 1, capacity, dtype=model.dtype, device=model.device)
    turns = []
    for speculation in speculations:
        stats = Stats(num_prompt_tokens=len(prompt))
        turns.append(
            (stats, *build_cascade(model, engine.draft, full, [list(prompt)], [seed], sampling, speculation, stats))
        )
    watchers = [policy for _, _, policy in turns if policy and policy.wants_prompt]
    started = time.perf_counter()
    for first in range(0, len(prompt) - 1, chunk):
        piece = prompt[first : min(first + chunk, len(prompt) - 1)]
        shape = (model.config.num_layers, 1, len(piece), model.config.num_heads, model.config.head_dim)
        queries_LBTHD = torch.empty(shape, dtype=model.dtype, device=model.device) if watchers else None
        read_block(model, [piece], full, queries_LBTHD)
        full.advance([len(piece)])
        for policy in watchers:
            assert queries_LBTHD is not None
            policy.observe(full, 0, queries_LBTHD[:, 0], full.lengths[0])
        print(f"\r  read {full.lengths[0]} of {len(prompt)} tokens", end="", file=sys.stderr, flush=True)
    print(f", {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    for stats, cascade, _ in turns:
        full.crop([len(prompt) - 1])
        cascade.start()
        started = time.perf_counter()
        while len(cascade.sequences[0]) < len(prompt) + num_new:
            stats.num_decoded_tokens += len(cascade.step()[0].tokens)
        stats.decode_seconds = time.perf_counter() - started
    return [stats for stats, _, _ in turns]
