"""Measures how fast each layout trains on this machine's CPU: tokens/s at 1, 2 and 4 processes, and the time spent in messages.

Run `python -m distrain.scripts.bench_layouts [rounds=3] [KEY=VALUE ...]` on a quiet machine. The layouts take turns, so that other
load on the machine affects all alike; a speed-up is the median over rounds of the ratio to that round's single process. The seconds
of messages are those in which torch's profiler saw at least one under way on rank 0. Each process has one thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..cli.config.load import load_recipe
from ..trainer.machine.facts import measure_once
from ..trainer.plan.plan import make_plan
from ..trainer.prove.fork_client import ForkServer

STEPS, WARM_UP, TRACED = 12, 2, 3  # steps of a run; the first and the last, which are profiled, are not counted
OVERRIDES = (  # four layers of 256, 2048 tokens a step
    *("model=quickstart", "model.layers=4", "model.hidden=256", "model.heads=4", "data=synthetic", "train.seq=256", "train.batch=8"),
    *("train.microbatch=1", "train.precision=fp32", f"train.steps={STEPS}", "train.evaluate.every=0", "log.every=1", "log.sinks=[jsonl]"),
    *("optim.warmup=2", f"log.profile=[{STEPS - TRACED + 1},{STEPS}]"),
)
# fmt: off
LAYOUTS: tuple[tuple[str, int, tuple[str, ...]], ...] = (  # name, processes, overrides
    ("one process",  1, ("train.microbatch=4",)),
    ("dp2 ZeRO-1",   2, ("parallel.zero=1", "train.microbatch=4")),
    ("dp2 ZeRO-3",   2, ("parallel.zero=3", "train.microbatch=4")),
    ("tp2",          2, ("parallel.zero=0", "parallel.tp=2", "train.microbatch=4")),
    ("tp2 sequence", 2, ("parallel.zero=0", "parallel.tp=2", "parallel.sequence=true", "train.microbatch=4")),
    ("pp2 1f1b",     2, ("parallel.zero=0", "parallel.pp=2")),
    ("pp2 gpipe",    2, ("parallel.zero=0", "parallel.pp=2", "parallel.schedule=gpipe")),
    ("dp4 ZeRO-1",   4, ("parallel.zero=1", "train.microbatch=2")),
    ("dp2 tp2",      4, ("parallel.zero=1", "parallel.tp=2", "train.microbatch=4")),
    ("dp2 pp2",      4, ("parallel.zero=1", "parallel.pp=2")),
    ("tp2 pp2",      4, ("parallel.zero=0", "parallel.tp=2", "parallel.pp=2")),
)
# fmt: on
PICOTRON = {"dp2 ZeRO-1": 1.81, "pp2 1f1b": 1.46, "tp2": 1.25}  # its speed-up over its own single process, on two cores


@dataclass(frozen=True, kw_only=True)
class LayoutTiming:
    """Seconds of a step and of its messages, measured and planned (None: not planned)."""

    step: float
    messages: float
    planned_step: float | None
    planned_messages: float | None


def main() -> None:
    arguments = sys.argv[1:]
    overrides = [each for each in arguments if not each.startswith("rounds=")]
    rounds = next((int(each.removeprefix("rounds=")) for each in arguments if each.startswith("rounds=")), 3)
    measure_once(lambda: "cpu", print)
    timings: dict[str, list[LayoutTiming]] = {name: [] for name, *_ in LAYOUTS}
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server:
        for number in range(rounds):
            for name, ranks, layout in LAYOUTS:
                run_folder = Path(folder) / f"{name.replace(' ', '_')}.{number}"
                timings[name].append(time_layout(server, run_folder, ranks, (*OVERRIDES, *layout, *overrides)))
                _show_live(f"round {number + 1} of {rounds}: {name}")
    _show_live("")
    _print_table(timings)


def time_layout(server: ForkServer, folder: Path, ranks: int, overrides: Sequence[str]) -> LayoutTiming:
    """Train a layout and time it; exits if it fails."""
    run = load_recipe("quickstart", [*overrides, f"cluster.gpus={ranks}", f"log.dir={folder.parent}", f"name={folder.name}"])
    plan = make_plan(run)
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    result = server.run_job(folder / "run.json", ranks)
    if any(result.codes):
        sys.exit(f"{' '.join(overrides)}: {result.says}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["seconds"] for row in rows if "seconds" in row][WARM_UP : STEPS - TRACED]
    (trace,) = (folder / "trace").glob("*.json")
    return LayoutTiming(
        step=median(steps),
        messages=message_seconds(json.loads(trace.read_text())) / TRACED,
        planned_step=plan.time.step if plan.time else None,
        planned_messages=plan.time.exposed if plan.time else None,
    )


def message_seconds(trace: dict[str, Any]) -> float:
    """Seconds of a trace in which at least one message was under way."""
    spans = sorted(
        (each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each.get("ph") == "X" and str(each.get("name", "")).startswith("gloo:")
    )
    total = covered_until = 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total / 1e6


def _print_table(timings: dict[str, list[LayoutTiming]]) -> None:
    columns = ("processes", "tokens/s", "speed-up", "picotron", "step", "planned", "messages", "planned")
    print(f"{'layout':<14}" + "".join(f"{column:>10}" for column in columns))
    run = load_recipe("quickstart", OVERRIDES)
    tokens, one_process = run.train.batch * run.train.seq, timings[LAYOUTS[0][0]]
    for name, ranks, _ in LAYOUTS:
        rounds = timings[name]
        speed_up = median(one.step / each.step for one, each in zip(one_process, rounds, strict=True))
        step, messages = median(each.step for each in rounds), median(each.messages for each in rounds)
        times = (step, rounds[-1].planned_step, messages, rounds[-1].planned_messages)
        cells = (str(ranks), f"{tokens / step:,.0f}", f"{speed_up:.2f}", str(PICOTRON.get(name, "")), *map(_milliseconds, times))
        print(f"{name:<14}" + "".join(f"{cell:>10}" for cell in cells))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _show_live(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
