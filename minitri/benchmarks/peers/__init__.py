"""Other programs on the same weights and prompts: `python -m minitri.bench --compare --peers`.

`choice.py` says which there are. `transformers` runs in this process, the others each in their own,
by any Python interpreter that has them. All decode greedily, which favours prompt lookup.
"""

from collections.abc import Callable, Iterator

StartPeer = Callable[[list[int], int], Iterator[int]]
"""Continues a prompt by some number of tokens, one at a time; the first follows the prefill. What
is loaded for it is loaded before it returns."""
