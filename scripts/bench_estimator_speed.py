"""Benchmark of the estimator: processor microseconds for one layout, averaged over a sweep, against a budget.

Run `python -m distrain.scripts.bench_estimator_speed [RECIPE] [REPEATS]`; it exits with 1 above the budget.
"""

from __future__ import annotations

import sys
from itertools import product
from time import process_time
from typing import Literal

from ..cli.config.load import load_recipe
from ..trainer.plan.costs.roofline import tile_efficiency
from ..trainer.plan.estimate import Estimator
from ..trainer.spec.run import Parallel, Run
from .show_help import show_help

BUDGET = 50e-6  # seconds of processor time an estimate
ZEROS: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
RECOMPUTES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
PIPELINES = (("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 3))  # schedule, chunks

Layouts = list[tuple[Parallel, int]]


def layouts() -> Layouts:
    """Return (parallel, micro-batch) of a search's sweep over all axes; a pipeline of one stage has one schedule."""
    swept: Layouts = []
    for tp, pp, zero, recompute, sequence, micro, (schedule, chunks) in product(
        (1, 2, 4, 8), (1, 2, 4, 6, 8, 12, 16, 32), ZEROS, RECOMPUTES, (False, True), (1, 2, 4), PIPELINES
    ):
        if pp > 1 or schedule == "1f1b":
            parallel = Parallel(tp=tp, pp=pp, zero=zero, recompute=recompute, sequence=sequence, schedule=schedule, chunks=chunks)
            swept.append((parallel, micro))
    return swept


def seconds(run: Run, swept: Layouts) -> float:
    """Return the processor seconds of a sweep by a new estimator with empty caches."""
    tile_efficiency.cache_clear()
    start = process_time()
    estimator = Estimator(run)
    for parallel, micro in swept:
        estimator(parallel, micro)
    return process_time() - start


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "gpt3_175b"
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    run = load_recipe(recipe)
    every = layouts()
    estimator = Estimator(run)
    legal = [layout for layout in every if estimator(*layout).legal]
    exceeded = False
    print(f"{recipe}, best of {repeats}{'layouts':>20}{'µs each':>10}{'budget':>8}")
    for name, swept in (("all", every), ("legal", legal)):
        each = min(seconds(run, swept) for _ in range(repeats)) / len(swept)
        exceeded |= each > BUDGET
        print(f"{name:<{len(recipe) + 11}}{len(swept):>20}{each * 1e6:>10.1f}{BUDGET * 1e6:>8.0f}{'  over' if each > BUDGET else ''}")
    sys.exit(exceeded)


if __name__ == "__main__":
    show_help(__doc__)
    main()
