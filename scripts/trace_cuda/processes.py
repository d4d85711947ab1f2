"""Processes that trace ranks of runs: each loads the device guard before torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .device_guard import device_guard


@dataclass(frozen=True, kw_only=True)
class TraceJob:
    """A recipe with overrides, and the ranks to trace; none: the first rank of the first and of the last stage.

    `what` is traced: the passes (rank_trace.py), or of rank 0 what host_step.py or host_rows.py does.
    """

    what: Literal["passes", "host_step", "host_rows"] = "passes"
    recipe: str
    words: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


def trace(jobs: Sequence[TraceJob]) -> Iterator[tuple[TraceJob, dict[str, Any]]]:
    """Yield each job with its answer, in order: {"ranks": [{"traced": RankTrace's fields, "planned": PlannedBytes'}]}, {"traced": ...,
    "planned": ...} of a host's step or rows, or {"error": why}.

    Raises NoGuard where the device guard can't be made.
    """
    device_guard()
    with subprocess.Popen(
        [sys.executable, "-m", "distrain.scripts.trace_cuda.trace_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for job in jobs:
                process.stdin.write(f"{json.dumps(asdict(job))}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                yield job, json.loads(line) if line else {"error": f"the process ended with {process.wait()}"}
        finally:
            process.kill()
