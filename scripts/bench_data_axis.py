"""Measures workers that step alone (`parallel.sync`): the time of a step over a slow link, and what a model learns.

    python -m distrain.scripts.bench_sync link     # as root: two hosts of this machine (virtual_hosts.py), whose link has LINK bytes/s
    python -m distrain.scripts.bench_sync curve    # two processes, 300 steps of the quickstart recipe for each row

Rows of one call ran on the same machine, one after another. A step over the link is the mean of COUNTED steps, a multiple of each
interval, so that each step together is counted once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..cli.config.load import load_recipe
from ..trainer.machine.facts import measure_once
from ..trainer.plan.plan import make_plan
from .virtual_hosts import VirtualHosts, missing_tools

LINK, LATENCY = 12.5e6, 1e-4  # bytes/s in one direction, seconds
WARM_UP, COUNTED = 5, 50
SHARED = ("parallel.zero=0", "engine=native", "log.every=1", "checkpoint.final=false")
OUTER = ("parallel.sync.outer.lr=0.7", "parallel.sync.outer.momentum=0.9", "parallel.sync.outer.nesterov=true")
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1: gradients are summed", ()),
    ("5", ("parallel.sync.every=5",)),
    ("25", ("parallel.sync.every=25",)),
    ("5, outer step", ("parallel.sync.every=5", *OUTER)),
    ("25, outer step", ("parallel.sync.every=25", *OUTER)),
)


def main() -> None:
    match sys.argv[1:]:
        case ["link"]:
            measure_link()
        case ["curve"]:
            measure_curves()
        case _:
            sys.exit("say what to measure: link, or curve")


def measure_link() -> None:
    """Print a step's time over a slow link, as planned and as measured, for each interval."""
    if why := missing_tools():
        sys.exit(why)
    measure_once(lambda: "cpu", print)
    link = (f"cluster.between.bandwidth={LINK:g}", f"cluster.between.latency={LATENCY:g}", "cluster.between.efficiency=1")
    first = [0.0, 0.0]
    print(f"{'parallel.sync.every':<26}{'planned':>10}{'measured':>10}{'ratio':>8}{'ratio':>8}")
    with TemporaryDirectory() as folder, VirtualHosts(2, Path(folder) / "hosts") as network:
        hosts = ("launch=deepspeed", f"launch.hostfile={network.write_hostfile(1)}", "launch.environment=[OMP_NUM_THREADS]")
        for host in network.hosts:
            host.run(*f"tc qdisc add dev eth0 root tbf rate {8 * LINK:.0f}bit burst 32k latency 500ms".split())
        for name, words in ROWS[:3]:
            words = (
                *SHARED,
                *words,
                *link,
                "cluster.nodes=2",
                "cluster.gpus=1",
                f"train.steps={WARM_UP + COUNTED}",
                "train.evaluate.every=0",
            )
            planned = make_plan(load_recipe("quickstart", list(words))).time
            fit(network.hosts[0].command_line, Path(folder) / "runs", *words, *hosts)
            seconds = [row["seconds"] for row in rows(Path(folder) / "runs")][WARM_UP:]
            found = (planned.step if planned else 0.0, sum(seconds) / len(seconds))
            first = list(found) if not first[0] else first
            ratios = "".join(f"{each / base:>8.2f}" for each, base in zip(found, first, strict=True))
            print(f"{name:<26}{''.join(f'{each * 1e3:>7.0f} ms' for each in found)}{ratios}", flush=True)


def measure_curves() -> None:
    """Print the losses of the quickstart recipe after 300 steps of two workers, for each interval and outer step."""
    print(f"{'parallel.sync.every':<26}{'loss':>8}{'validation':>12}")
    for name, words in ROWS:
        with TemporaryDirectory() as folder:
            fit(list, Path(folder), *SHARED, *words)
            last = [row for row in rows(Path(folder)) if "validation_loss" in row][-1]
        print(f"{name:<26}{last['loss']:>8.4f}{last['validation_loss']:>12.4f}", flush=True)


def fit(command_line: Any, folder: Path, *words: str) -> None:
    """Train the quickstart recipe afresh, with its run folder in `folder`."""
    command = [sys.executable, "-m", "distrain", "fit", "conf=quickstart", f"log.dir={folder}", "checkpoint.resume=never", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the hosts share this machine's cores
    done = subprocess.run(command_line(command), capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def rows(folder: Path) -> Sequence[dict[str, Any]]:
    """Read the metrics of the quickstart run in a folder."""
    return [json.loads(line) for line in (folder / "quickstart" / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
