"""Benchmark of what search chooses: its first three layouts and three others, run on this machine, planned and measured.

Run `python -m distrain.scripts.bench_search [ROUNDS]`. Each layout of a model of 10 million parameters trains on four processes (gloo) in
each round; a figure is the median over the rounds, and its spread their slowest over their fastest.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ..cli.config.load import load_recipe
from ..trainer.plan.search.search_result import FoundLayout, find_layouts
from ..trainer.rundir.metric_rows import read_step_rows
from .show_help import show_help

TOP = 3
STEPS = 6
SKIPPED = 2  # steps that warm up
WORDS = (
    "cluster=1x4", "model.layers=6", "model.hidden=360", "model.heads=6", "model.vocab=2048", "data=synthetic", "train.batch=16",
    "train.seq=128", f"train.steps={STEPS}", "train.evaluate.every=0", "optim.warmup=0", "search.rows=1000000",
)  # fmt: skip


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    every = find_layouts(load_recipe("quickstart", [*WORDS])).rows
    chosen = [*every[:TOP], *(every[TOP + round(at * (len(every) - TOP - 1) / 2)] for at in range(3))]
    seconds: list[list[float]] = [[] for _ in chosen]
    for at in range(rounds):
        for layout, found in zip(chosen, seconds, strict=True):  # in turn, so that a busy machine slows all of them
            found.append(measured_step(layout))
        print(f"after round {at + 1} of {rounds}:\n{table(chosen, seconds)}", flush=True)


def table(chosen: Sequence[FoundLayout], seconds: Sequence[Sequence[float]]) -> str:
    """A row for each layout, with its ratio to the best planned and to the fastest measured one, and where that one is."""
    best, fastest = chosen[0].step or 0.0, min(map(median, seconds))
    lines = [f"{'layout':<54}{'planned':>9}{'ratio':>7}{'measured':>10}{'ratio':>7}{'spread':>8}"]
    for layout, found in zip(chosen, seconds, strict=True):
        step, planned = median(found), layout.step or 0.0
        figures = f"{planned:>7.3f} s{planned / best:>7.2f}{step:>8.3f} s{step / fastest:>7.2f}{max(found) / min(found):>8.2f}"
        lines.append(f"{layout_words(layout):<54}{figures}")
    rank = min(range(len(chosen)), key=lambda each: median(seconds[each])) + 1
    among = "among" if rank <= TOP else "not among"
    return "\n".join([*lines, f"the fastest measured is layout {rank}: {among} the first {TOP} of the search"])


def measured_step(layout: FoundLayout) -> float:
    """The median seconds of a step of one run, without its first ones."""
    with TemporaryDirectory() as folder:
        words = [*WORDS, *layout.overrides, f"log.dir={folder}", "log.every=1"]
        subprocess.run([sys.executable, "-m", "distrain", "fit", "conf=quickstart", *words], check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        rows = read_step_rows(metrics.parent)
    return float(median(row["seconds"] for row in rows if row["step"] > SKIPPED))


def layout_words(layout: FoundLayout) -> str:
    """A layout in a line."""
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in layout.mesh.items() if degree > 1)
    staged = f", {layout.schedule}" if layout.mesh["pp"] > 1 else ""
    return f"{mesh}, micro-batch {layout.microbatch}, ZeRO {layout.zero}{staged}, {layout.engine}"


if __name__ == "__main__":
    show_help(__doc__)
    main()
