"""Measures how much of a step the stages of a pipeline idle under each schedule, beside the plan, and prints a table.

Run `python -m distrain.scripts.measure_idle [SCHEDULE ...] [KEY=VALUE ...]` on a machine where nothing else runs. At two stages the share
is that of the clock, each stage on a core of its own. At four, which share the cores, the order and dependencies of the real step are
replayed with the processor seconds that each action took, as if each stage had a core. Schedules without a flush go on from step to step:
theirs is the share of 17 steps after the first ones. Seconds of a step, planned and measured, are those of two stages: four share cores.
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
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.layout.actions_without_flush import flush_actions, step_actions
from ..trainer.plan.layout.schedule_of_run import schedule_of
from ..trainer.plan.layout.simulate import simulate
from ..trainer.plan.plan import make_plan
from ..trainer.plan.plan_data import Plan
from ..trainer.prove.fork_client import ForkServer
from ..trainer.rundir.metric_rows import read_step_rows
from ..trainer.spec.run import Run
from .show_help import show_help

MICROS, ROUNDS, DEADLINE = 8, 3, 300.0
CONTINUED_STEPS = 24  # of a run without a flush: 20 of them are timed
WARM = 2  # timed steps that are not counted
BASE = (
    *("quickstart", "model=quickstart", "model.layers=16", "model.hidden=192", "model.heads=4", "model.vocab=256", "data=synthetic"),
    *("train.seq=128", "train.microbatch=2", "train.precision=fp32", "train.steps=4", "train.evaluate.every=0", "log.every=1"),
    *("log.sinks=[jsonl]", "log.ledger=true", "checkpoint.final=false", "optim.warmup=2", "engine=native", f"train.batch={2 * MICROS}"),
)
SCHEDULE_OVERRIDES: Mapping[str, tuple[str, ...]] = {
    "gpipe": (),
    "1f1b": (),
    "interleaved": ("parallel.chunks=2",),
    "zb_h1": (),
    "zb_v": (),
    "dualpipev": (),
    "dualpipev_w": (),
    "pipedream": (f"train.steps={CONTINUED_STEPS}", "model.tied=false"),
    "pipedream_2bw": (f"train.steps={CONTINUED_STEPS}", "model.tied=false"),
}


def main(words: Sequence[str]) -> None:
    """Measure the named schedules, or all, at two and at four stages."""
    named = [word for word in words if word in SCHEDULE_OVERRIDES]
    overrides = [word for word in words if word not in named]
    measure_once(lambda: "cpu", print)
    print(f"{'schedule':<14}{'stages':>7}{'planned':>9}{'idle':>7}{'apart':>7}{'planned':>10}{'step':>9}  by")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with ForkServer(log, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as server:
            for stages in (2, 4):
                for name in named or SCHEDULE_OVERRIDES:
                    layout = (f"parallel.schedule={name}", f"parallel.pp={stages}", f"cluster.gpus={stages}", *SCHEDULE_OVERRIDES[name])
                    shares, steps = [], []
                    for number in range(ROUNDS):
                        at = Path(folder) / f"{name}-{stages}-{number}"
                        run = load_recipe(BASE[0], [*BASE[1:], *layout, *overrides, f"log.dir={folder}", f"name={at.name}"])
                        shares.append(idle_share(server, run, at))
                        steps.append(step_seconds(at))
                    plan = make_plan(run)
                    print(table_row(name, stages, plan, median(shares), median(steps)), flush=True)


def table_row(name: str, stages: int, plan: Plan, idle: float, seconds: float) -> str:
    """A line of the table."""
    planned, step = plan.bubble_fraction or 0.0, plan.time.step if plan.time else 0.0
    by = "the clock" if stages == 2 else "replay"
    times = f"{1e3 * step:>7.0f} ms{1e3 * seconds:>6.0f} ms" if stages == 2 else f"{'-':>10}{'-':>9}"
    return f"{name:<14}{stages:>7}{100 * planned:>8.1f}%{100 * idle:>6.1f}%{100 * (idle - planned):>+7.1f}{times}  {by}"


def step_seconds(folder: Path) -> float:
    """The median seconds of a run's steps after the third, in which messages are counted; of a short run, its last step's."""
    return float(median(row["seconds"] for row in read_step_rows(folder)[3:]))


def idle_share(server: ForkServer, run: Run, folder: Path) -> float:
    """Train a run, and return the share of a step that its busiest stage idles."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    result = server.run_job(folder / "run.json", run.parallel.pp, seconds=DEADLINE)
    if set(result.codes) != {0}:
        raise SystemExit(f"{folder.name} failed: {result.problems}")
    ranks = json.loads((folder / "actions.json").read_text())["ranks"]
    if schedule_of(run.parallel).flushes:
        return clock_share(ranks) if run.parallel.pp == 2 else replayed_share(run, ranks)
    return continued_clock_share(ranks) if run.parallel.pp == 2 else continued_replayed_share(run, ranks)


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


def continued_clock_share(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The share of the clock that the busiest stage of a pipeline without a flush does not compute: from a step's first forward on it to
    the first forward of a later step."""
    first, last = _counted_micros(ranks)
    return min(1 - _busy(rows, first, last) / (_start(rows, last) - _start(rows, first)) for rows in ranks)


def continued_replayed_share(run: Run, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """The same of simulated steps in which each action takes its own processor seconds, a backward those of its update too."""
    stages, micros = run.parallel.pp, {row["micro"] for row in ranks[0] if row["kind"] == "F"}
    first, many = min(micros), len(micros)
    seconds: dict[tuple[str, int, int], float] = {}
    for row in (row for rows in ranks for row in rows):
        key = "F" if row["kind"] == "F" else "B", row["part"], row["micro"] - first
        seconds[key] = seconds.get(key, 0.0) + row["cpu"]
    for part in range(stages):  # the trace ends before the backwards of the last micro-batches
        known = median(each for (kind, at, _), each in seconds.items() if (kind, at) == ("B", part))
        seconds |= {("B", part, micro): known for micro in range(many) if ("B", part, micro) not in seconds}
    actions = [step_actions(stage, stages, 0, many) + flush_actions(stage, stages, many) for stage in range(stages)]
    step = simulate(actions, folded=False, seconds=seconds)
    rows = [[{"kind": e.action.kind, "micro": e.action.micro, "start": e.start, "end": e.end} for e in events] for events in step.events]
    return continued_clock_share(rows)


def _counted_micros(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, int]:
    """The first micro-batch of the first step that is counted, and that of the last timed step, which is not."""
    micros = [row["micro"] for row in ranks[0] if row["kind"] == "F"]
    return min(micros) + WARM * MICROS, max(micros) + 1 - MICROS


def _start(rows: Sequence[Mapping[str, Any]], micro: int) -> float:
    return float(next(row["start"] for row in rows if (row["kind"], row["micro"]) == ("F", micro)))


def _busy(rows: Sequence[Mapping[str, Any]], first: int, last: int) -> float:
    begin, end = _start(rows, first), _start(rows, last)
    return sum(float(row["end"] - row["start"]) for row in rows if begin <= row["start"] < end)


if __name__ == "__main__":
    show_help(__doc__)
    main(sys.argv[1:])
