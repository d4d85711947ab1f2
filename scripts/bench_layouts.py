"""Measures how fast each layout trains on this machine's CPU: tokens/s at 1, 2 and 4 processes, and the time spent in messages.

Run `python -m distrain.scripts.bench_layouts [rounds=3] [processes=4] [KEY=VALUE ...]` on a quiet machine; `processes` is the most of a
layout. The layouts take turns on engine native and on DeepSpeed's, so that other load on the machine affects all alike; a speed-up is the
median over rounds of the ratio to the faster of that round's single processes. The seconds of messages are those in which torch's
profiler saw at least one under way on rank 0. Each process has one thread. Two apart are two runs of one process at once, each of half the
batch and without messages: what the machine leaves of two cores, hence the most that two data ranks can reach.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..cli.config.load import load_recipe
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.plan import make_plan
from ..trainer.prove.fork_client import ForkServer
from .show_help import show_help

STEPS, WARM_UP, TRACED = 12, 2, 3  # steps of a run; the first and the last, which are profiled, are not counted
OVERRIDES = (  # four layers of 256, 2048 tokens a step
    *("model=quickstart", "model.layers=4", "model.hidden=256", "model.heads=4", "data=synthetic", "train.seq=256", "train.batch=8"),
    *("train.microbatch=1", "train.precision=fp32", f"train.steps={STEPS}", "train.evaluate.every=0", "log.every=1", "log.sinks=[jsonl]"),
    *("optim.warmup=2", f"log.profile=[{STEPS - TRACED + 1},{STEPS}]"),
)
APART = "two apart"
# fmt: off
LAYOUTS: tuple[tuple[str, int, str, tuple[str, ...]], ...] = (  # name, processes, engines, overrides
    ("one process",     1, "native zero", ("train.microbatch=4",)),
    (APART,             2, "native zero", ("train.batch=4", "train.microbatch=4")),
    ("dp2 ZeRO-1",      2, "native zero", ("parallel.zero=1", "train.microbatch=4")),
    ("dp2 ZeRO-2",      2, "native zero", ("parallel.zero=2", "train.microbatch=4")),
    ("dp2 ZeRO-3",      2, "native zero", ("parallel.zero=3", "train.microbatch=4")),
    ("tp2",             2, "native zero", ("parallel.zero=0", "parallel.tp=2", "train.microbatch=4")),
    ("tp2 sequence",    2, "native zero", ("parallel.zero=0", "parallel.tp=2", "parallel.sequence=true", "train.microbatch=4")),
    ("pp2 1f1b",        2, "native pipe", ("parallel.zero=0", "parallel.pp=2")),
    ("pp2 gpipe",       2, "native pipe", ("parallel.zero=0", "parallel.pp=2", "parallel.schedule=gpipe")),
    ("pp2 zb_h1",       2, "native",      ("parallel.zero=0", "parallel.pp=2", "parallel.schedule=zb_h1")),
    ("pp2 interleaved", 2, "native",      ("parallel.zero=0", "parallel.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2")),
    ("dp4 ZeRO-1",      4, "native zero", ("parallel.zero=1", "train.microbatch=2")),
    ("dp2 tp2",         4, "native zero", ("parallel.zero=1", "parallel.tp=2", "train.microbatch=4")),
    ("dp2 pp2",         4, "native pipe", ("parallel.zero=1", "parallel.pp=2")),
    ("tp2 pp2",         4, "native pipe", ("parallel.zero=0", "parallel.tp=2", "parallel.pp=2")),
)
# fmt: on
PICOTRON = {"dp2 ZeRO-1": 1.81, "pp2 1f1b": 1.46, "tp2": 1.25}  # its speed-up over its own single process, on two cores
AIMS = {"dp2 ZeRO-1": 1.9, "pp2 1f1b": 1.6, "tp2": 1.5}  # engine native's

Case = tuple[str, str]  # a layout's name, an engine


@dataclass(frozen=True, kw_only=True)
class LayoutTiming:
    """Seconds of a step and of its messages, measured and planned (None: not planned)."""

    step: float
    messages: float
    planned_step: float | None
    planned_messages: float | None


def main() -> None:
    rounds, overrides = _number("rounds", 3), [each for each in sys.argv[1:] if not each.startswith(("rounds=", "processes="))]
    chosen = [row for row in LAYOUTS if row[1] <= _number("processes", 4)]
    measure_once(lambda: "cpu", print)
    timings: dict[Case, list[LayoutTiming]] = {(name, engine): [] for name, _, engines, _ in chosen for engine in engines.split()}
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server, ForkServer(Path(folder) / "other.log") as other:
        for number in range(rounds):
            for name, ranks, engines, layout in chosen:
                for engine in engines.split():
                    run_folder = Path(folder) / f"{name.replace(' ', '_')}.{engine}.{number}"
                    words = (*OVERRIDES, *layout, f"engine={engine}", *overrides)
                    servers = (server, other) if name == APART else (server,)
                    timings[name, engine].append(time_at_once(servers, run_folder, ranks, words))
                    _show_live(f"round {number + 1} of {rounds}: {name}, {engine}")
    _show_live("")
    _print_table(timings)


def _number(key: str, default: int) -> int:
    return next((int(each.partition("=")[2]) for each in sys.argv[1:] if each.startswith(f"{key}=")), default)


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


def time_at_once(servers: Sequence[ForkServer], folder: Path, ranks: int, overrides: Sequence[str]) -> LayoutTiming:
    """Train a layout on each server at the same time, with an equal share of the ranks; the slowest one's timing. Exits if one fails."""
    folders = [folder.with_name(f"{folder.name}.{number}") for number in range(len(servers))]
    with ThreadPoolExecutor() as threads:
        timings = threads.map(lambda server, own: time_layout(server, own, ranks // len(servers), overrides), servers, folders)
        return max(timings, key=lambda each: each.step)


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


def _print_table(timings: dict[Case, list[LayoutTiming]]) -> None:
    columns = ("processes", "tokens/s", "speed-up", "aim", "picotron", "step", "planned", "messages", "planned")
    print(f"{'layout':<16}{'engine':<7}" + "".join(f"{column:>10}" for column in columns))
    run = load_recipe("quickstart", OVERRIDES)
    tokens, ranks_of = run.train.batch * run.train.seq, {name: ranks for name, ranks, *_ in LAYOUTS}
    singles = [rounds for (name, _), rounds in timings.items() if ranks_of[name] == 1]
    one_process = [min(each.step for each in engines) for engines in zip(*singles, strict=True)]
    for (name, engine), rounds in timings.items():
        speed_up = median(one / each.step for one, each in zip(one_process, rounds, strict=True))
        step, messages = median(each.step for each in rounds), median(each.messages for each in rounds)
        times = (step, rounds[-1].planned_step, messages, rounds[-1].planned_messages)
        aims = (str(AIMS.get(name, "")) if engine == "native" else "", str(PICOTRON.get(name, "")))
        cells = (str(ranks_of[name]), f"{tokens / step:,.0f}", f"{speed_up:.2f}", *aims, *map(_milliseconds, times))
        print(f"{name:<16}{engine:<7}" + "".join(f"{cell:>10}" for cell in cells))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _show_live(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    show_help(__doc__)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
