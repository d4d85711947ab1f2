"""Benchmark of simulated steps: pipelines of two stages trained on this machine's CPU, beside what `distrain simulate` says.

Run `python -m distrain.scripts.bench_timeline [ROUNDS]` on a quiet machine with two cores. The pipelines take turns in each round, on
engine native, so that other load slows all alike. Their stages differ in layers and in schedule: what is tested is how much longer than the
even 1F1B each is, so both columns of ratios begin with 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from ..cli.config.load import load_recipe
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.timeline.simulated_seconds import simulated_seconds
from ..trainer.plan.timeline.step_costs import step_costs
from ..trainer.prove.fork_client import ForkServer
from .bench_layouts import OVERRIDES, time_layout
from .show_help import show_help

RANKS = 2
SHARED = (*OVERRIDES, "model.layers=8", "parallel.zero=0", f"parallel.pp={RANKS}", "engine=native")
# fmt: off
PIPELINES: tuple[tuple[str, tuple[str, ...]], ...] = (  # name, overrides
    ("1f1b, 4 + 4 layers",      ("parallel.stages=[4,4]",)),
    ("1f1b, 5 + 3 layers",      ("parallel.stages=[5,3]",)),
    ("1f1b, 3 + 5 layers",      ("parallel.stages=[3,5]",)),
    ("1f1b, 6 + 2 layers",      ("parallel.stages=[6,2]",)),
    ("1f1b, 2 + 6 layers",      ("parallel.stages=[2,6]",)),
    ("gpipe",                   ("parallel.stages=[4,4]", "parallel.schedule=gpipe")),
    ("interleaved, 2 chunks",   ("parallel.schedule=interleaved", "parallel.chunks=2")),
    ("zb_h1",                   ("parallel.stages=[4,4]", "parallel.schedule=zb_h1")),
    ("zb_v",                    ("parallel.schedule=zb_v",)),
    ("1f1b, 2 micro-batches",   ("parallel.stages=[4,4]", "train.microbatch=4")),
)
# fmt: on


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    measure_once(lambda: "cpu", print)
    measured: list[list[float]] = [[] for _ in PIPELINES]
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server:
        for number in range(rounds):
            for at, (_, words) in enumerate(PIPELINES):
                measured[at].append(time_layout(server, Path(folder) / f"{number}.{at}", RANKS, (*SHARED, *words)).step)
            print(f"after round {number + 1} of {rounds}:\n{table(measured)}", flush=True)


def table(measured: list[list[float]]) -> str:
    """A row for each pipeline: seconds simulated and measured, and both over those of the first."""
    simulated = [simulated_step((*SHARED, *words)) for _, words in PIPELINES]
    lines = [f"{'pipeline':<24}{'simulated':>11}{'measured':>11}{'ratio':>8}{'ratio':>8}{'apart':>9}"]
    for (name, _), planned, seconds in zip(PIPELINES, simulated, measured, strict=True):
        ratio = planned / simulated[0]
        found = median(each / first for each, first in zip(seconds, measured[0], strict=True))
        figures = f"{1e3 * planned:>8.0f} ms{1e3 * median(seconds):>8.0f} ms{ratio:>8.3f}{found:>8.3f}{100 * (ratio / found - 1):>+7.1f} %"
        lines.append(f"{name:<24}{figures}")
    return "\n".join(lines)


def simulated_step(words: tuple[str, ...]) -> float:
    """The simulated seconds of a pipeline's step."""
    costs = step_costs(load_recipe("quickstart", [*words, f"cluster.gpus={RANKS}"]))
    assert costs
    return simulated_seconds(costs)


if __name__ == "__main__":
    show_help(__doc__)
    main()
