"""Measures how much of a step the stages of a pipeline idle under each schedule, beside the plan, and prints a table.

Run `python -m distrain.scripts.measure_idle [KEY=VALUE ...]` on a machine where nothing else runs. At two stages the share is that of the
clock, each stage on a core of its own. At four, which share the cores, the order and dependencies of the real step are replayed with the
processor seconds that each action took, as if each stage had a core.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..cli.config.load import load_recipe
from ..trainer.machine.facts import measure_once
from ..trainer.plan.layout.run_schedule import schedule_of
from ..trainer.plan.layout.simulate import simulate
from ..trainer.plan.plan import make_plan
from ..trainer.plan.result import Plan
from ..trainer.prove.fork_client import ForkServer
from ..trainer.spec.run import Run

MICROS, ROUNDS, DEADLINE = 8, 3, 300.0
BASE = (
    *("quickstart", "model=quickstart", "model.layers=16", "model.hidden=192", "model.heads=4", "model.vocab=256", "data=synthetic"),
    *("train.seq=128", "train.microbatch=2", "train.precision=fp32", "train.steps=4", "train.evaluate.every=0", "log.every=1"),
    *("log.sinks=[jsonl]", "log.ledger=true", "checkpoint.every=0", "optim.warmup=2", "engine=native", f"train.batch={2 * MICROS}"),
)
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "gpipe": (),
    "1f1b": (),
    "interleaved": ("parallel.chunks=2",),
    "zb_h1": (),
    "zb_v": (),
    "dualpipev": (),
    "dualpipev_w": (),
}


def main(words: Sequence[str]) -> None:
    """Measure every schedule at two and at four stages."""
    measure_once(lambda: "cpu", print)
    print(f"{'schedule':<12}{'stages':>7}{'planned':>9}{'idle':>7}{'apart':>7}  by")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ForkServer(log, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as server:
            for stages in (2, 4):
                for name, further in SCHEDULES.items():
                    layout = (f"parallel.schedule={name}", f"parallel.pp={stages}", f"cluster.gpus={stages}", *further)
                    shares = []
                    for number in range(ROUNDS):
                        at = Path(folder) / f"{name}-{stages}-{number}"
                        run = load_recipe(BASE[0], [*BASE[1:], *layout, *words, f"log.dir={folder}", f"name={at.name}"])
                        shares.append(idle_share(server, run, at))
                    plan = make_plan(run)
                    print(table_row(name, stages, plan, median(shares)), flush=True)


def table_row(name: str, stages: int, plan: Plan, idle: float) -> str:
    """A line of the table."""
    planned = plan.bubble_fraction or 0.0
    by = "the clock" if stages == 2 else "replay"
    return f"{name:<12}{stages:>7}{100 * planned:>8.1f}%{100 * idle:>6.1f}%{100 * (idle - planned):>+7.1f}  {by}"


def idle_share(server: ForkServer, run: Run, folder: Path) -> float:
    """Train a run, and return the share of a step that its busiest stage idles."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    result = server.run_job(folder / "run.json", run.parallel.pp, seconds=DEADLINE)
    if set(result.codes) != {0}:
        raise SystemExit(f"{folder.name} failed: {result.problems}")
    ranks = json.loads((folder / "actions.json").read_text())["ranks"]
    return clock_share(ranks) if run.parallel.pp == 2 else replayed_share(run, ranks)


def clock_share(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The share of the time from the first action of any stage to the last that the busiest stage does not compute."""
    whole = max(row["end"] for rows in ranks for row in rows) - min(row["start"] for rows in ranks for row in rows)
    busy = max(sum(row["end"] - row["start"] for row in rows) for rows in ranks)
    return 1 - float(busy / whole)


def replayed_share(run: Run, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The same of the simulated step in which each action takes its own processor seconds."""
    schedule, stages = schedule_of(run.parallel), run.parallel.pp
    actions = [schedule.actions(stage, stages, MICROS, schedule.parts(run.parallel.chunks)) for stage in range(stages)]
    seconds = {(row["kind"], row["part"], row["micro"]): float(row["cpu"]) for rows in ranks for row in rows}
    return min(simulate(actions, folded=schedule.folded, seconds=seconds).idle)


if __name__ == "__main__":
    main(sys.argv[1:])
