"""Grammars of a toy vocabulary, compiled by each test anew: another may have changed the code."""

import pytest

from tests.text.test_grammars import TOY


@pytest.fixture(autouse=True)
def nothing_compiled():
    TOY.grammars.clear()
