"""Every known bug of speculative decoding, put in on purpose, is noticed.

For each of `tests/mutants.py` there is a test that passes with the real code and fails with the
bug, by an assertion or a clear error: not because the change does not run. The table says which.
Most of them are slow:

    python -m pytest -m slow tests/engine/test_mutants.py
"""

import functools

import pytest

from minitri.core.errors import InputError, NotFiniteError
from tests.mutants import MUTANTS
from tests.mutation import Outcome, mutated, run_tests

CLEAR = (AssertionError, InputError, NotFiniteError, pytest.fail.Exception)


KEY = {
    "resample from p-hat",
    "bonus token from the wrong row",
    "biased acceptance numbers",
    "float32 uniforms",
    "noise key of hash(seed + position)",
    "a guess of probability 0 accepted by the number 0",
    "a block ends at the first test that fails",
    "rejected guesses left in the cache",
    "top-p drops the token that reaches the mass",
    "a sibling's q still holds the elder ones",
    "one generator for all rows",
    "a new text is sampled by the old one's filters",
}
"""Those that the fast run tries; the others are slow tests."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=() if mutant.name in KEY else pytest.mark.slow)
        for mutant in MUTANTS
    ],
)
def test_a_mutant_dies(mutant):
    healthy = outcome_of(mutant.killer)
    assert (healthy.failed, len(healthy.passed)) == ([], 1)
    with mutated(mutant):
        sick = run_tests(mutant.killer)
    assert len(sick.failed) == 1
    assert issubclass(sick.errors[0], CLEAR)


@functools.cache
def outcome_of(killer: str) -> Outcome:
    return run_tests(killer)


def test_names_of_mutants_differ():
    names = {mutant.name for mutant in MUTANTS}
    assert not KEY - names
    assert len(names) == len(MUTANTS) >= 90
