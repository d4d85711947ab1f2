"""Benchmark of the search: processor seconds of whole spaces, layouts costed and discarded.

Run `python -m distrain.scripts.bench_search_speed [RECIPE [KEY=VALUE ...]]`; without arguments it searches five models and clusters.
"""

from __future__ import annotations

import sys
from time import process_time

from ..cli.config.load import load_recipe
from ..trainer.plan.search.search import search_layouts
from .show_help import show_help

CASES = (
    ("llama3_8b_1node",),
    ("llama3_70b", "cluster=8x8"),
    ("mixtral_8x7b", "cluster=64x8"),
    ("gpt3_175b", "cluster=384x8"),
    ("llama3_405b", "cluster=2048x8"),
)


def main() -> None:
    cases = (tuple(sys.argv[1:]),) if len(sys.argv) > 1 else CASES
    print(f"{'':<32}{'GPUs':>7}{'layouts':>12}{'costed':>9}{'CPU s':>8}{'µs a layout':>13}{'µs a costed one':>17}")
    for recipe, *overrides in cases:
        run = load_recipe(recipe, overrides)
        start = process_time()
        found = search_layouts(run, rows=run.search.rows)
        seconds = process_time() - start
        each, costed = (1e6 * seconds / max(1, count) for count in (found.legal, found.costed))
        name, world = " ".join((recipe, *overrides)), run.cluster.nodes * run.cluster.gpus
        print(f"{name:<32}{world:>7,}{found.legal:>12,}{found.costed:>9,}{seconds:>8.2f}{each:>13.2f}{costed:>17.0f}", flush=True)


if __name__ == "__main__":
    show_help(__doc__)
    main()
