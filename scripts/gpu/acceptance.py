"""Carries out the checks, what is timed alone and the others side by side, and keeps what they find in a JSON file."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import msgspec

from ...trainer.system.atomic_file import write_atomically
from .check_context import MACHINE, CheckContext
from .checks import GpuCheck
from .running_check import POLL, Row, RunningCheck

SCHEMA = 1
LEAST = 10.0  # seconds that must be left for a check to be begun


@dataclass(frozen=True, kw_only=True)
class Report:
    """All checks: `rehearsal` says that they ran on a CPU with tiny models."""

    schema: int
    rehearsal: bool
    seconds: float
    rows: Sequence[Row]

    def write(self, path: Path) -> None:
        """Replace the file."""
        write_atomically(path, json.dumps(msgspec.to_builtins(self), indent=1).encode() + b"\n")


def read_report(path: Path, *, rehearsal: bool) -> Report | None:
    """Return the report in a file, None without one; raises ValueError where it is no such report, or of another device."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is no report of these checks: {error}") from error
    if report.schema != SCHEMA or report.rehearsal != rehearsal:
        raise ValueError(f"{path} is of {'a rehearsal' if report.rehearsal else 'a GPU'}, schema {report.schema}")
    return report


def carry_out(
    checks: Sequence[GpuCheck],
    context: CheckContext,
    *,
    seconds: float,
    path: Path,
    earlier: Report | None,
    on_begin: Callable[[GpuCheck], None],
    on_row: Callable[[Row], None],
) -> Report:
    """Carry out checks until `seconds` are over, but those that `earlier` holds, and rewrite the file after each."""
    began = time.monotonic()
    spent = earlier.seconds if earlier else 0.0
    done = {row.name: row for row in earlier.rows if row.is_done} if earlier else {}
    rows = {check.name: done.get(check.name, Row(name=check.name, status="not run")) for check in checks}

    def report() -> Report:
        return Report(
            schema=SCHEMA, rehearsal=not context.on_gpu, seconds=spent + time.monotonic() - began, rows=[*rows.values(), *others]
        )  # fmt: skip

    def start(check: GpuCheck) -> RunningCheck | None:
        left = seconds - (time.monotonic() - began)
        if left < LEAST:
            return None
        on_begin(check)
        known = {row.name: row.figures for row in report().rows if row.is_done}
        machine = known.get(MACHINE, {})
        return RunningCheck(check, replace(context, gpu=str(machine.get("gpu", "")), memory=machine.get("memory"), earlier=known), left)

    others = [row for name, row in done.items() if name not in rows]
    left_over = [check for check in checks if not rows[check.name].is_done]
    with closing(run_checks(left_over, start, context.checks_at_once)) as ended:
        for row in ended:
            rows[row.name] = row
            report().write(path)
            on_row(row)
            if row.name == MACHINE and row.status == "broken":
                break  # without its device nothing else runs
    whole = report()
    whole.write(path)
    return whole


def run_checks(checks: Sequence[GpuCheck], start: Callable[[GpuCheck], RunningCheck | None], together: int) -> Generator[Row]:
    """Run checks in their order, neighbours that are not timed side by side, at most so many `together`; yield what became of each when it
    ends.

    `start` returns None for a check that can't begin. Whatever ends this ends the checks that run.
    """
    for alone, group in groupby(checks, key=lambda check: check.alone):
        at_once = 1 if alone else together
        waiting, running = deque(group), list[RunningCheck]()
        with ExitStack() as stack:
            while waiting or running:
                while waiting and len(running) < at_once:
                    if (begun := start(waiting.popleft())) is not None:
                        running.append(stack.enter_context(begun))
                for each in tuple(running):
                    if (row := each.row()) is not None:
                        running.remove(each)
                        yield row
                time.sleep(POLL)
