"""Every known bug of speculative decoding, put in on purpose, is noticed.

For each of `tests/mutants.txt` there is a test that passes with the real code and fails with the
bug, by an assertion or a clear error: not because the change does not run. The table says which.
Most of them are slow:

    python -m pytest -m slow tests/engine/test_mutants.py
"""

import functools
from pathlib import Path

import pytest

from minitri.core.errors import InputError, NotFiniteError
from tests.mutation import mutated, read_table, run_tests

MUTANTS = read_table(Path(__file__).parents[1] / "mutants.txt")
CLEAR = (AssertionError, InputError, NotFiniteError, pytest.fail.Exception)
run_healthy = functools.cache(run_tests)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=mutant.name, marks=[] if mutant.is_quick else pytest.mark.slow)
        for mutant in MUTANTS
    ],
)
def test_a_mutant_dies(mutant):
    healthy = run_healthy(mutant.killer)
    assert (healthy.errors, healthy.num_passed) == ([], 1)
    with mutated(mutant):
        sick = run_tests(mutant.killer)
    assert len(sick.errors) == 1
    assert issubclass(sick.errors[0], CLEAR)
