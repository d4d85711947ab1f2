"""Carries out the checks, each in a process with a deadline, and keeps what they find in a JSON file."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...trainer.system.atomic_file import write_atomically
from ...trainer.system.child_process import module_arguments, start_child
from .check_context import CheckContext
from .checks import MACHINE, CheckRequest, GpuCheck

SCHEMA = 1
LEAST = 10.0  # seconds that must be left for a check to be begun

Status = Literal["passed", "failed", "broken", "not run"]  # failed: it ran, and figures are not as they must be


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a check."""

    name: str
    status: Status
    seconds: float = 0.0
    says: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether it needs not be carried out again."""
        return self.status in ("passed", "failed")


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

    others = [row for name, row in done.items() if name not in rows]
    for check in checks:
        left = seconds - (time.monotonic() - began)
        if rows[check.name].is_done or left < LEAST:
            continue
        on_begin(check)
        known = {row.name: row.figures for row in report().rows if row.is_done}
        here = replace(context, gpu=str(known.get(MACHINE, {}).get("gpu", "")), earlier=known)
        rows[check.name] = run_check(check, here, left)
        report().write(path)
        on_row(rows[check.name])
        if check.name == MACHINE and rows[check.name].status == "broken":
            break  # without its device nothing else runs
    whole = report()
    whole.write(path)
    return whole


def run_check(check: GpuCheck, context: CheckContext, left: float) -> Row:
    """Carry out a check in a process of its own, which is killed at its deadline, or after `left` seconds, with all that it has started."""
    seconds = min(check.seconds, left)
    request, found = context.folder / "request.json", context.folder / "finding.json"
    found.unlink(missing_ok=True)
    request.write_bytes(CheckRequest(check=check, context=context).to_json())
    began, log = time.monotonic(), context.folder / f"{check.name.replace(' ', '.')}.log"
    arguments = module_arguments("distrain.scripts.gpu.check_process", str(request), str(found))
    with (
        log.open("wb") as output,
        start_child(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
    taken = round(time.monotonic() - began, 2)
    if code is None and left < check.seconds:
        return Row(name=check.name, status="not run", seconds=taken, says=[f"cut after {seconds:.0f} s: the program's time was over"])
    if code is None:
        return Row(name=check.name, status="broken", seconds=taken, says=[f"killed after {seconds:.0f} s"])
    if not found.exists():
        return Row(name=check.name, status="broken", seconds=taken, says=[f"its process ended with {code}", *_tail(log)])
    answer = json.loads(found.read_bytes())
    if "broken" in answer:
        return Row(name=check.name, status="broken", seconds=taken, says=[answer["broken"]])
    departures = answer["departures"]
    status: Status = "failed" if departures else "passed"
    return Row(name=check.name, status=status, seconds=taken, says=departures, figures=answer["figures"])


def _tail(log: Path) -> Iterator[str]:
    yield from log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-2:]
