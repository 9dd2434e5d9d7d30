"""Every known bug of speculative decoding, put in on purpose, is noticed.

For each of `tests/mutants.py` there is a test that passes with the real code and fails with the
bug, by an assertion or a clear error: not because the change does not run. The table says which.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from minitri.decoding.verification import NotFiniteError
from minitri.errors import InputError
from tests.mutants import MUTANTS
from tests.mutation import mutated, run_tests

CLEAR = (AssertionError, InputError, NotFiniteError, pytest.fail.Exception)


def test_mutants_die(capfd):
    killers = dict.fromkeys(mutant.killer for mutant in MUTANTS)
    healthy = run_tests(*killers)
    assert (healthy.failed, len(healthy.passed)) == ([], len(killers))
    rows = []
    for mutant in MUTANTS:
        with mutated(mutant):
            sick = run_tests(mutant.killer)
        dies = len(sick.failed) == 1 and issubclass(sick.errors[0], CLEAR)
        rows.append((mutant, sick.seconds, dies))
    with capfd.disabled():
        print(f"\n  {'mutant':54s} {'seconds':>7s}         killed by")
        for mutant, seconds, dies in rows:
            fate = "dies" if dies else "LIVES"
            print(f"  {mutant.name:54s} {seconds:7.1f}  {fate:5s}  {mutant.killer}")
    assert all(dies for _, _, dies in rows)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_a_mutant_is_put_in_and_taken_out():
    """The function that others hold by name changes, too; a text that is not there is refused."""
    from minitri.decoding import noise, random_source

    [mutant] = [it for it in MUTANTS if it.name == "noise key of hash(seed + position)"]
    healthy = noise.noise_key(3, 4)
    with mutated(mutant):
        assert random_source.noise_key(3, 4) == random_source.noise_key(4, 3) != healthy
    assert random_source.noise_key(3, 4) == healthy
    wrong = replace(mutant, old="not there")
    with pytest.raises(AssertionError, match="not there once"), mutated(wrong):
        pass
