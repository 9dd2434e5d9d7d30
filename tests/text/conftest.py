"""Grammars of a toy vocabulary, compiled by each test anew: another may have changed the code."""

import pytest

from minitri.text.matcher import compile_grammar


@pytest.fixture(autouse=True)
def nothing_compiled():
    compile_grammar.cache_clear()
