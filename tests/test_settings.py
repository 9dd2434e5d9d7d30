"""Settings and counts: the default of each, and the least and the most that it takes."""

import math
from ast import literal_eval
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest

from minitri.core import roofline
from minitri.core.config import ModelConfig, RopeConfig
from minitri.core.errors import InputError
from minitri.core.fields import check_fields
from minitri.core.model.execution import Execution
from minitri.core.requests import Token
from minitri.core.roofline import Machine, Workload
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig, StepPlan
from minitri.core.stats import LevelStats, RowStats, Stats
from minitri.files.named_models import ModelChoice
from minitri.text.grammar import Grammar

SETTINGS = [SamplingParams, GenerationConfig, SpeculationConfig, ModelChoice, Grammar, ModelConfig]
SETTINGS += [RopeConfig, Execution, Machine, Workload, StepPlan, Token]
COUNTS = [Stats, LevelStats, RowStats]
MACHINES = {"CPU": roofline.CPU, "NARROW_CPU": roofline.NARROW_CPU, "GPU": roofline.GPU}
MACHINES |= {f"CARD_{gib:g}": machine for gib, machine in roofline.CARDS.items()}
TABLE = Path(__file__).with_name("settings.txt").read_text("utf-8").splitlines()
"""Rows of a class and a field, its default, and the least and the most that it takes, if any."""
ROWS = [line.split() for line in TABLE[1:]]


@pytest.mark.parametrize("kind", [*SETTINGS, *COUNTS], ids=lambda kind: kind.__name__)
def test_a_setting_has_its_default_and_its_limits(kind):
    """One more or less than its limits is refused; rules between settings are left out here."""
    alone = type(kind.__name__, (kind,), {"__post_init__": check_fields})
    needed = {field.name: 2 for field in fields(kind) if has_no_default(field)}
    made = kind(**needed)
    for value in vars(kind).values():  # what follows from defaults is defined, too
        if isinstance(value, property) and value.fget:
            value.fget(made)
    for _, name, default, *limits in [row for row in ROWS if row[0] == kind.__name__]:
        assert name in needed if default == "-" else getattr(made, name) == literal_eval(default)
        if kind in SETTINGS:
            with pytest.raises(FrozenInstanceError):
                setattr(made, name, 1)
        for limit, step in zip(map(literal_eval, limits), (-1, 1), strict=False):
            assert getattr(alone(**needed | {name: limit}), name) == limit
            is_whole = isinstance(literal_eval(limits[0]), int)
            beyond = limit + step if is_whole else math.nextafter(limit, step * math.inf)
            with pytest.raises(InputError, match=f"{name} is .*; "):
                alone(**needed | {name: beyond})


def has_no_default(field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


FITS = [
    (SamplingParams, {"temperature": 1e-6, "logit_bias": {"0": 100, 2**31 - 1: -100}}),
    (SpeculationConfig, {"tree": "64", "budget": 1024, "chunk_size": 1024}),
    (RopeConfig, {"low_freq_factor": 4.0, "high_freq_factor": 4.01, "beta_fast": 1.0}),
    (RopeConfig, {"frequency_divisors": (1e-6, 1e6)}),
]


@pytest.mark.parametrize(("kind", "settings"), FITS)
def test_settings_that_just_go_together_are_taken(kind, settings):
    assert kind(**settings)


def test_nominal_machines_are_those_of_the_table():
    """Predicted costs choose plans, so with other numbers a seed would give another text."""
    lookup = Workload(ModelConfig(*[2] * 8), None, 1, 1)
    for name, field, value in [row for row in ROWS if len(row) == 3 and row[0] in MACHINES]:
        assert getattr(MACHINES[name], field) == literal_eval(value), name
        assert lookup.seconds(MACHINES[name], "draft", 1) < 1e-6
