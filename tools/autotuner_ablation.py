"""What the autotuner loses without each of its constants, in simulation.

    python tools/autotuner_ablation.py --seeds 16

A loss is the simulated time per token of method `auto` over that of the fixed method that is
fastest on the machine, less 1; what is tried on the way is included. The machines and the
simulation are those of `tests/core/decoding/test_autotuner.py`. Prints a markdown table: mean
over the machines and, in brackets, the worst, in percent. It takes about 3 s per seed.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tests' simulation

from minitri.core.decoding import autotuner

simulation: Any = importlib.import_module("tests.core.decoding.test_autotuner")
MACHINES, METHODS, simulated_ms = (
    getattr(simulation, name) for name in ("MACHINES", "METHODS", "simulated_ms")
)

NEUTRAL: dict[str, Any] = {
    "FIRST_RATES": {"draft": 0.75, "retrieval": 0.75},
    "FIRST_TESTED": 0.01,
    "MEMORY": 1.0,
    "SMOOTHING": 1.0,
    "HYSTERESIS": 1.0,
    "EXPLORATION": 1.0,
}
"""Values that take each constant out."""
WRONG = [(stage, factor) for stage in ("draft", "retrieval") for factor in (0.5, 2.0)]
"""Stages whose prior costs are wrong by a factor, in the last column."""


def fastest(machine: Any, num_seeds: int, num_tokens: int, drift: float) -> float:
    """Milliseconds per token of the best fixed method."""
    methods = [name for name in METHODS if name != "auto"]
    return min(simulated_ms(machine, name, num_seeds, num_tokens, drift) for name in methods)


def losses(num_seeds: int, best: dict[Any, float]) -> str:
    """A row of the table: steady, drifting, wrong priors."""
    columns = []
    for drift in (0.0, 0.04):
        columns.append(
            [simulated_ms(m, "auto", num_seeds, 128, drift) / best[m, 128, drift] for m in MACHINES]
        )
    few = max(1, num_seeds // 2)
    columns.append(
        [
            simulated_ms(m, "auto", few, 256, wrong=wrong) / best[m, 256, 0.0]
            for m in MACHINES
            for wrong in WRONG
        ]
    )
    cells = (f"{100 * (sum(c) / len(c) - 1):.1f} ({100 * (max(c) - 1):.1f})" for c in columns)
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="(default: 16)")
    num_seeds = parser.parse_args().seeds
    best = {}
    for machine in MACHINES:
        for num_tokens, drift in ((128, 0.0), (128, 0.04), (256, 0.0)):
            seeds = num_seeds if num_tokens == 128 else max(1, num_seeds // 2)
            best[machine, num_tokens, drift] = fastest(machine, seeds, num_tokens, drift)
    print("| autotuner | steady | drifting | wrong priors |\n|---|---|---|---|")
    print(f"| as it is | {losses(num_seeds, best)} |", flush=True)
    for name, value in NEUTRAL.items():
        kept = getattr(autotuner, name)
        setattr(autotuner, name, value)
        simulated_ms.cache_clear()
        print(f"| without {name} | {losses(num_seeds, best)} |", flush=True)
        setattr(autotuner, name, kept)


if __name__ == "__main__":
    main()
