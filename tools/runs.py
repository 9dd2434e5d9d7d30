"""Runs without text and events, for measurements and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minitri.core.decoding.level import Level
from minitri.core.decoding.random_source import RandomSource
from minitri.core.memory import Models, allocate
from minitri.core.requests import Request, RequestState
from minitri.core.settings import SpeculationConfig
from minitri.core.shape import MemoryShape
from minitri.core.stack import Stack
from minitri.trees.tree_level import TreeLevel


def begin(
    models: Models,
    requests: Sequence[Request],
    speculation: SpeculationConfig,
    *,
    sources: Mapping[str, RandomSource] | None = None,
    **memory: Any,
) -> Stack:
    """A stack over memory of its own, one row for each request, whose prompts are token ids.

    `sources` replaces the random sources of the named stages; `memory` is passed to `allocate`.
    """
    first = requests[0]
    prompts = [[int(token) for token in it.prompt] for it in requests]
    lengths = tuple(len(prompt) for prompt in prompts)
    shape = MemoryShape(lengths, first.sampling, first.generation, speculation)
    models = replace(models, level_type=TreeLevel)
    stack = Stack(allocate(models, shape, **memory), shape)
    for stage in stack.cascade.stages:
        if isinstance(stage, Level):
            stage.source = (sources or {}).get(stage.name, stage.source)
            stage.source.rule, stage.source.run_rule = stack.source.rule, stack.source.run_rule
    for b, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        stack.admit(b, RequestState(b, request, prompt))
    return stack
