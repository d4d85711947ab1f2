"""Measures how far training on this machine's CPU is from its plans: from this the error bar of a CPU's step time was fitted.

Run `python -m distrain.scripts.bench_cpu_plan [KEY=VALUE ...]` on a quiet machine of two cores or more; it takes about four minutes. It
measures the machine first, as `distrain fit` does, then trains each row for some steps, and prints the seconds of a step, planned and
measured, their ratio, and the bar of the plan. A process has its share of the cores as threads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from ..cli.config.load import load_recipe
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.plan import make_plan
from ..trainer.prove.fork_client import ForkServer
from ..trainer.system.cpu import cpu_count
from .show_help import show_help

STEPS, WARM_UP = 16, 4  # steps of a run; the first, which are not counted
BASE = (
    *("data=synthetic", f"train.steps={STEPS}", "train.evaluate.every=0", "log.every=1", "log.sinks=[jsonl]", "optim.warmup=2"),
    *("checkpoint.final=false", "cluster.gpus=2"),
)
LLAMA = ("model.family=llama", "model.act=swiglu", "model.norm=rmsnorm", "model.positions=rope", "model.bias=false", "model.ffn=704")
# fmt: off
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (  # a recipe and overrides
    ("quickstart",       ()),
    ("quickstart",       ("engine=native",)),
    ("quickstart",       ("cluster.gpus=1", "train.batch=8")),
    ("quickstart",       ("parallel.zero=3",)),
    ("quickstart",       ("parallel.zero=0", "parallel.tp=2")),
    ("quickstart",       ("parallel.zero=0", "parallel.pp=2", "train.microbatch=4")),
    ("quickstart",       ("parallel.zero=0", "parallel.cp=2")),
    ("quickstart",       ("train.attention=math",)),
    ("quickstart",       ("model.act=gelu",)),
    ("quickstart",       LLAMA),
    ("quickstart",       ("model.hidden=512", "model.ffn=2048", "train.microbatch=4")),
    ("quickstart",       ("train.seq=512", "train.microbatch=2")),
    ("nano_shakespeare", ("cluster.gpus=1", "model.vocab=96")),
)
# fmt: on


class StepInBar(NamedTuple):
    """Seconds of a step: planned, the ends of the plan's error bar, and the median of those measured."""

    planned: float
    low: float
    high: float
    measured: float


def main() -> None:
    if problem := measure_once(lambda: "cpu", print):
        sys.exit(str(problem))
    print(f"{'recipe and overrides':<74}{'planned':>10}{'measured':>10}{'ratio':>7}  bar")
    ratios = []
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server:
        for number, (recipe, overrides) in enumerate(ROWS):
            found = time_run(server, Path(folder) / str(number), recipe, (*overrides, *sys.argv[1:]))
            ratios.append(found.measured / found.planned)
            inside = "inside" if found.low <= found.measured <= found.high else "OUTSIDE"
            cells = f"{1e3 * found.planned:>7,.0f} ms{1e3 * found.measured:>7,.0f} ms{ratios[-1]:>7.2f}"
            print(
                f"{' '.join((recipe, *overrides))[:73]:<74}{cells}  {1e3 * found.low:,.0f} to {1e3 * found.high:,.0f}: {inside}", flush=True
            )
    print(f"ratios: {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}")


def time_run(server: ForkServer, folder: Path, recipe: str, overrides: tuple[str, ...]) -> StepInBar:
    """Train a recipe for some steps and time it; exits if it fails or has no planned time."""
    run = load_recipe(recipe, [*BASE, *overrides, f"log.dir={folder.parent}", f"name={folder.name}"])
    plan, ranks = make_plan(run), run.cluster.nodes * run.cluster.gpus
    if plan.time is None or plan.step_low is None or plan.step_high is None:
        sys.exit(f"{recipe} {' '.join(overrides)}: no time is planned")
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    result = server.run_job(folder / "run.json", ranks, threads=max(1, cpu_count() // ranks))
    if any(result.codes):
        sys.exit(f"{recipe} {' '.join(overrides)}: {result.says}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["seconds"] for row in rows if "seconds" in row][WARM_UP:]
    return StepInBar(plan.time.step, plan.step_low, plan.step_high, median(steps))


if __name__ == "__main__":
    show_help(__doc__)
    main()
