"""Benchmark of log.timeline: steps that record their actions beside steps of the same run that do not, on this machine's CPU.

Run `python -m distrain.scripts.bench_recorder [ROUNDS]` on a quiet machine with two cores. Each engine trains a small model on two
processes; the window is the middle third of a run's steps, so that other load slows both alike. Beside their ratio stands what a span takes
by itself, measured in a loop, times the spans of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter

import msgspec
import torch

from ..cli.config.load import load_recipe
from ..trainer.engines.span_recorder import SpanRecorder
from ..trainer.prove.fork_client import ForkServer
from ..trainer.rundir.metric_rows import read_step_rows
from ..trainer.rundir.timeline_files import read_timelines
from .show_help import show_help

THIRD, WARM, RANKS, DEADLINE = 20, 6, 2, 600.0  # steps of a third; steps before them
SPANS = 100_000  # of the loop
BASE = (
    *("model=quickstart", "model.layers=4", "model.hidden=128", "model.heads=4", "data=synthetic", "train.seq=64", "train.batch=16"),
    *("train.microbatch=1", "train.precision=fp32", f"train.steps={WARM + 3 * THIRD}", "train.evaluate.every=0", "log.every=1"),
    *("log.sinks=[jsonl]", "optim.warmup=2", "checkpoint.final=false", f"cluster.gpus={RANKS}"),
    f"log.timeline=[{WARM + THIRD + 1},{WARM + 2 * THIRD}]",
)
ENGINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("native", ("parallel.pp=2", "parallel.zero=0")),
    ("pipe", ("parallel.pp=2", "parallel.zero=0")),
    ("zero", ("parallel.zero=1",)),
)


def main() -> None:
    """Train each engine so many times in turn and print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    steps: dict[str, list[tuple[float, float, float]]] = {engine: [] for engine, _ in ENGINES}
    with TemporaryDirectory() as folder, ForkServer(Path(folder) / "server.log") as server:
        for number in range(rounds):
            for engine, words in ENGINES:
                steps[engine].append(measured_run(server, Path(folder) / f"{engine}{number}", (*BASE, *words, f"engine={engine}")))
    span = span_seconds()
    print(f"{'engine':<8}{'spans':>7}{'step':>11}{'in the window':>15}{'ratio':>8}{'all spans':>13}{'share':>9}")
    for engine, found in steps.items():
        spans, outside, inside = (median(column) for column in zip(*found, strict=True))
        ratio = median(two / one for _, one, two in found)
        figures = f"{1e3 * outside:>8.2f} ms{1e3 * inside:>12.2f} ms{ratio:>8.3f}{1e6 * span * spans:>10.1f} us"
        print(f"{engine:<8}{spans:>7.0f}{figures}{100 * span * spans / outside:>7.3f} %")
    print(f"a span takes {1e6 * span:.2f} us")


def measured_run(server: ForkServer, folder: Path, words: Sequence[str]) -> tuple[float, float, float]:
    """Train a run; return (the mean spans of a step on a rank, median seconds of its steps outside the window and in it)."""
    run = load_recipe("quickstart", [*words, f"log.dir={folder.parent}", f"name={folder.name}"])
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    result = server.run_job(folder / "run.json", RANKS, seconds=DEADLINE)
    if set(result.codes) != {0}:
        raise SystemExit(f"{folder.name} failed: {result.problems}")
    seconds = [row["seconds"] for row in read_step_rows(folder)][WARM:]
    spans = fmean(len(step.spans) for each in read_timelines(folder, run) for step in each.steps)
    return spans, median([*seconds[:THIRD], *seconds[2 * THIRD :]]), median(seconds[THIRD : 2 * THIRD])


def span_seconds() -> float:
    """The seconds that a span takes: its two marks, and what keeps it."""
    recorder = SpanRecorder(torch.device("cpu"))
    recorder.begin_step()
    start = perf_counter()
    for number in range(SPANS):
        recorder.add("F", recorder.mark(), number, 0)
    return (perf_counter() - start) / SPANS


if __name__ == "__main__":
    show_help(__doc__)
    main()
