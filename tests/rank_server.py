"""A fork server of ranks: it imports torch and DeepSpeed once, and forks each job's ranks from there.

It is run by path. A job is a line of JSON on stdin, how it ended a line on stdout:

    {"run": RUN_DIR/run.json, "ranks": 2, "seconds": 60, "signals": [[step, rank, signal], ...]}
    {"codes": [0, 0], "said": [rank 0's lines], "problems": [...], "late": false}

A rank is a real one: it meets the others over gloo, talks to a control pipe, and logs to RUN_DIR/ranks/N.log. A signal is
sent to its rank when that rank says that it is at that step.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # the first optimizer of a process imports it

from distrain.trainer.engines.zero import deepspeed
from distrain.trainer.launch import talk
from distrain.trainer.launch.place import Place, reserve_port
from distrain.trainer.loop.rank import run_rank

GRACE = 5.0  # seconds that ranks have after one has failed
PDEATHSIG = 1  # prctl(2)


@dataclass(kw_only=True)
class Rank:
    """A forked rank: its process, its control pipe and what came out of it."""

    pid: int
    control: int
    code: int | None = None
    half: bytes = b""
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def hear(self) -> list[int]:
        """Keep what it has said; the steps that it is at. When its pipe has ended, so has it: its status is noted."""
        heard = os.read(self.control, 1 << 16)
        if not heard:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.control)
        *lines, self.half = (self.half + heard).split(b"\n")
        words = [json.loads(line) for line in lines]
        self.said += [word["say"] for word in words if "say" in word]
        self.problems += [word["problem"] for word in words if "problem" in word]
        return [word["beat"] for word in words if "beat" in word]


def main() -> None:
    """Serve jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    deepspeed()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork has one of them, and waits for the others' locks"
    for line in sys.stdin:
        answers.write(json.dumps(served(json.loads(line))) + "\n")


def served(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job to its end, or to its deadline."""
    with reserve_port() as port:
        ranks = [started(Path(job["run"]), place) for place in places(job["ranks"], port.getsockname()[1])]
        late = watched(ranks, time.monotonic() + job["seconds"], job["signals"])
    return {
        "codes": [rank.code for rank in ranks],
        "said": ranks[0].said,
        "problems": [problem for rank in ranks for problem in rank.problems],
        "late": late,
    }


def places(ranks: int, port: int) -> Iterator[Place]:
    for rank in range(ranks):
        yield Place(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, address="127.0.0.1", port=port)


def started(run: Path, place: Place) -> Rank:
    """Fork a rank."""
    control, speak = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(control)
        become(run, place, speak)
    os.close(speak)
    return Rank(pid=pid, control=control)


def become(run: Path, place: Place, speak: int) -> None:
    """Be that rank, and end with its status."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        (run.parent / "ranks").mkdir(exist_ok=True)
        log = os.open(run.parent / "ranks" / f"{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update({**place.environment(os.environ), talk.VARIABLE: str(speak)})
        status = run_rank(run, talk.Talk.from_environment())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def watched(ranks: list[Rank], until: float, signals: list[list[int]]) -> bool:
    """Stay until all have ended; whether the deadline came first. Those that outlive a failed one by GRACE are killed."""
    late = failed = False
    while left := {rank.control: rank for rank in ranks if rank.code is None}:
        for control in select.select(list(left), [], [], 0.5)[0]:
            steps = left[control].hear()
            for number in (number for step, whom, number in signals if ranks[whom] is left[control] and step in steps):
                os.kill(left[control].pid, number)
        if not failed and any(rank.code not in (None, 0, talk.STOPPED) for rank in ranks):
            failed, until = True, min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            late |= not failed
            for rank in (rank for rank in left.values() if rank.code is None):
                os.kill(rank.pid, signal.SIGKILL)
    return late


if __name__ == "__main__":
    main()
