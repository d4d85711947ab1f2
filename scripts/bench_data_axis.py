"""Measures ways of the data axis to need less of a slow link: the time of a step over one, and what a model learns.

    python -m distrain.scripts.bench_data_axis link [WORD]    # as root: two hosts of this machine, whose link has LINK bytes/s
    python -m distrain.scripts.bench_data_axis curve [WORD]   # two processes, 300 steps of the quickstart recipe for each row

WORD: only rows whose name has it. Rows of one call ran on the same machine, one after another. A step over the link is the mean of COUNTED
steps, a multiple of each interval, so that each step that workers take together is counted once. The plan gives a rank half of this
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..cli.config.load import load_recipe
from ..trainer.machine.measure_machine import measure_once
from ..trainer.plan.plan import make_plan
from ..trainer.rundir.metric_rows import read_step_rows
from .show_help import show_help
from .virtual_hosts import VirtualHosts, missing_tools

LINK, LATENCY = 12.5e6, 1e-4  # bytes/s in one direction, seconds
WARM_UP, COUNTED = 5, 50
SHARED = ("parallel.zero=0", "engine=native", "log.every=1", "checkpoint.final=false")
OUTER = ("parallel.sync.outer.lr=0.7", "parallel.sync.outer.momentum=0.9", "parallel.sync.outer.nesterov=true")
POWERSGD = "parallel.compress.name=powersgd"


class BenchRow(NamedTuple):
    """A way of the data axis: its name, its overrides, whether it trains a curve of its own."""

    name: str
    words: tuple[str, ...]
    has_other_curve: bool = True


ROWS = (
    BenchRow("one all-reduce", ()),
    BenchRow("one server", ("parallel.reduce=server",), has_other_curve=False),
    BenchRow("two servers", ("parallel.reduce=server", "parallel.servers=2"), has_other_curve=False),
    BenchRow("sums 1 step late", ("parallel.staleness=1",)),
    BenchRow("sums 4 steps late", ("parallel.staleness=4",)),
    BenchRow("powersgd, rank 4", (POWERSGD, "parallel.compress.rank=4")),
    BenchRow("powersgd, rank 16", (POWERSGD, "parallel.compress.rank=16")),
    BenchRow("every 5 steps", ("parallel.sync.every=5",)),
    BenchRow("every 25 steps", ("parallel.sync.every=25",)),
    BenchRow("every 5 steps, outer", ("parallel.sync.every=5", *OUTER)),
    BenchRow("every 25 steps, outer", ("parallel.sync.every=25", *OUTER)),
)


def main() -> None:
    match sys.argv[1:]:
        case ["link", *word]:
            measure_link([each for each in chosen_rows(word) if not each.name.endswith("outer")])
        case ["curve", *word]:
            measure_curves([each for each in chosen_rows(word) if each.has_other_curve])
        case _:
            sys.exit("say what to measure: link, or curve")


def chosen_rows(words: Sequence[str]) -> Iterator[BenchRow]:
    """Yield the rows whose name has any of the words; all where there is none."""
    return (each for each in ROWS if not words or any(word in each.name for word in words))


def measure_link(rows: Sequence[BenchRow]) -> None:
    """Print a step's time over a slow link, as planned and as measured, for each row."""
    if why := missing_tools():
        sys.exit(why)
    measure_once(lambda: "cpu", print)
    first = [0.0, 0.0]
    print(f"{'':<24}{'planned':>10}{'measured':>10}{'ratio':>8}{'ratio':>8}")
    with TemporaryDirectory() as folder, VirtualHosts(2, Path(folder) / "hosts") as network:
        hosts = ("launch=deepspeed", f"launch.hostfile={network.write_hostfile(1)}", "launch.environment=[OMP_NUM_THREADS]")
        for host in network.hosts:
            host.run(*f"tc qdisc add dev eth0 root tbf rate {8 * LINK:.0f}bit burst 32k latency 500ms".split())
        for row in rows:
            words = (*SHARED, *row.words, *link_words(), f"train.steps={WARM_UP + COUNTED}", "train.evaluate.every=0")
            planned = make_plan(load_recipe("quickstart", list(words))).time
            own = Path(folder) / f"row{rows.index(row)}"
            fit(network.hosts[0].command_line, own, *words, *hosts)
            seconds = [each["seconds"] for each in read_metrics(own)][WARM_UP:]
            assert len(seconds) == COUNTED
            found = (planned.step if planned else 0.0, sum(seconds) / len(seconds))
            first = list(found) if not first[0] else first
            ratios = "".join(f"{each / base:>8.2f}" for each, base in zip(found, first, strict=True))
            print(f"{row.name:<24}{''.join(f'{each * 1e3:>7.0f} ms' for each in found)}{ratios}", flush=True)


def link_words() -> tuple[str, ...]:
    """Return the overrides of two hosts of one rank each, which share this machine as the recipe's two ranks do."""
    device = load_recipe("quickstart").cluster.device
    return (
        *("cluster.nodes=2", "cluster.gpus=1", f"cluster.device.bandwidth={device.bandwidth:g}"),
        *(f"cluster.device.peak.{kind}={peak:g}" for kind, peak in device.peak.items()),
        *(f"cluster.between.bandwidth={LINK:g}", f"cluster.between.latency={LATENCY:g}", "cluster.between.efficiency=1"),
    )


def measure_curves(rows: Sequence[BenchRow]) -> None:
    """Print the losses of the quickstart recipe after 300 steps of two workers, for each row."""
    print(f"{'':<24}{'loss':>8}{'validation':>12}")
    for row in rows:
        with TemporaryDirectory() as folder:
            fit(list, Path(folder), *SHARED, *row.words)
            last = [each for each in read_metrics(Path(folder)) if "validation_loss" in each][-1]
        print(f"{row.name:<24}{last['loss']:>8.4f}{last['validation_loss']:>12.4f}", flush=True)


def fit(command_line: Any, folder: Path, *words: str) -> None:
    """Train the quickstart recipe afresh, with its run folder in `folder`."""
    command = [sys.executable, "-m", "distrain", "fit", "conf=quickstart", f"log.dir={folder}", "checkpoint.resume=never", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the hosts share this machine's cores
    done = subprocess.run(command_line(command), capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def read_metrics(folder: Path) -> Sequence[dict[str, Any]]:
    """Read the metrics of the quickstart run in a folder."""
    return read_step_rows(folder / "quickstart")


if __name__ == "__main__":
    show_help(__doc__)
    main()
