"""The acceptance of a machine's GPU: what runs on it, what it reaches, and how far plans are from what is measured.

    python -m distrain.scripts.gpu [--json FILE] [--resume] [--seconds N] [--only NAME,NAME] [--cpu] [--list]

Each check runs in a process of its own with a deadline, those that time nothing side by side; FILE (gpu.json) is rewritten after each.
--resume leaves out the checks that FILE holds. --seconds (480) ends the program; checks that were not begun by then are listed as not
run. --cpu rehearses everything on this machine's CPU with tiny models, in up to five times the time, which says nothing about a GPU. It
needs no network.

Exit status: 0 all checks passed or need another machine; 1 one failed, was broken or not run; 2 the arguments are wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from ...trainer.system.stop_requests import StopSignal, raise_on_stop_signals
from .acceptance import Report, carry_out, read_report
from .check_context import MACHINE, CheckContext
from .checks import CHECKS, REHEARSAL, GpuCheck, chosen_checks
from .running_check import Row, Status

SECONDS = 480.0


def main() -> int:
    """Carry out what the command line asks for."""
    words = _arguments()
    if words.list:
        print("\n".join(f"{check.name:<38}{check.seconds:>5.0f} s at most" for check in CHECKS))
        return 0
    names = [name.strip() for name in words.only.split(",")] if words.only else [check.name for check in CHECKS]
    if wrong := [name for name in names if name not in {check.name for check in CHECKS}]:
        print(f"no check {', '.join(map(repr, wrong))}: --list names them", file=sys.stderr)
        return 2
    checks = chosen_checks(names, rehearsal=words.cpu)
    seconds = (REHEARSAL if words.cpu else 1) * SECONDS if words.seconds is None else words.seconds
    try:
        earlier = read_report(words.json, rehearsal=words.cpu) if words.resume else None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not words.resume and words.json.exists():
        print(f"{words.json} exists: --resume goes on with it, --json names another file", file=sys.stderr)
        return 2
    if not words.json.absolute().parent.is_dir():
        print(f"{words.json.absolute().parent} is no folder", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="distrain-gpu-") as folder:
        context = CheckContext(folder=words.folder or Path(folder), on_gpu=not words.cpu)
        context.folder.mkdir(parents=True, exist_ok=True)
        shown = Progress()
        try:
            with raise_on_stop_signals():
                report = carry_out(
                    checks, context, seconds=seconds, path=words.json, earlier=earlier, on_begin=shown.begin, on_row=shown.end
                )
        except (KeyboardInterrupt, StopSignal) as stop:
            print(f"stopped; --resume goes on with {words.json}", file=sys.stderr)
            return 128 + (stop.number if isinstance(stop, StopSignal) else signal.SIGINT)
    print("\n".join(closing_lines(report, words.json)))
    return int(any(row.status not in ("passed", "skipped") for row in report.rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distrain.scripts.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the file that is rewritten after each check")
    parser.add_argument("--resume", action="store_true", help="leave out the checks that the file holds")
    parser.add_argument("--seconds", type=float, help="after which no check is begun, and the last one is killed")
    parser.add_argument("--only", default="", help="names of checks, with commas")
    parser.add_argument("--folder", type=Path, help="keeps the runs' folders and the logs of checks")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on this machine's CPU")
    parser.add_argument("--list", action="store_true", help="print the names of checks")
    return parser.parse_args()


class Progress:
    """Prints what became of each check, and on a terminal the names of those that run."""

    def __init__(self) -> None:
        self._running = list[str]()

    def begin(self, check: GpuCheck) -> None:
        """Show that a check runs."""
        self._running.append(check.name)
        self._show_running()

    def end(self, row: Row) -> None:
        """Print what became of a check."""
        self._running.remove(row.name)
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print("\n".join(row_lines(row)), flush=True)
        self._show_running()

    def _show_running(self) -> None:
        if sys.stderr.isatty() and self._running:
            print(f"\r\x1b[K{', '.join(self._running)} ...", end="", file=sys.stderr, flush=True)


def row_lines(row: Row) -> Iterator[str]:
    """A check's status, seconds and main figures, then what is not as it must be."""
    yield f"{row.name:<38}{row.status:<8}{row.seconds:>7.1f} s  {summary(row)}".rstrip()
    yield from (f"    {line}" for line in row.says)


def summary(row: Row) -> str:
    """The main figures of a check, in a few words."""
    figures = row.figures
    if row.name.startswith("plan ") and figures:
        step, planned = figures["step_seconds"], figures["planned_step_seconds"]
        peak, planned_peak = figures["memory_peak"], figures["planned_memory_peak"]
        if not (planned and peak and planned_peak):  # a rehearsal
            return f"{1e3 * step:,.0f} ms a step"
        time = f"{1e3 * step:,.0f} ms a step, {100 * (step / planned - 1):+.1f} % of the plan"
        return f"{time}; {peak / 2**30:.2f} GiB, {100 * (peak / planned_peak - 1):+.1f} %"
    if row.name.startswith("baseline ") and figures:
        ratio, mfu = figures["fit's tokens/s of its"], figures["mfu"]
        text = f"{1e3 * figures['step_seconds']:,.0f} ms a step" + (f", MFU {100 * mfu:.1f} %" if mfu else "")
        return text + (f"; fit reaches {ratio:.2f} of its tokens/s" if ratio else "")
    if row.name == MACHINE and figures:
        rates = figures["matrix product, FLOP/s"]
        return (
            f"{figures.get('gpu', 'CPU')}: bf16 {rates['bfloat16'] / 1e12:.3g} TFLOP/s, "
            f"copy {figures['copy, bytes/s read and written'] / 1e9:.3g} GB/s"
        )  # fmt: skip
    return ""


def closing_lines(report: Report, path: Path) -> Sequence[str]:
    """How many checks came out how, and the names of those that were not run."""
    counts = {status: [row.name for row in report.rows if row.status == status] for status in get_args(Status)}
    line = ", ".join(f"{len(names)} {status}" for status, names in counts.items() if names)
    missing = [f"not run: {', '.join(counts['not run'])}; --resume goes on"] if counts["not run"] else []
    rehearsal = ["a rehearsal on a CPU: its figures say nothing about a GPU"] if report.rehearsal else []
    return [f"{line}; {report.seconds:.0f} s in all; {path}", *missing, *rehearsal]


if __name__ == "__main__":
    raise SystemExit(main())
