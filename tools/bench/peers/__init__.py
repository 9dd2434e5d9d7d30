"""Other programs on the same weights and prompts: `python -m tools.bench --compare --peer NAME`.

`choice.py` says which there are. `transformers` runs in this process, the others each in their own,
by any Python interpreter that has them. All decode greedily, which favours prompt lookup.
"""
