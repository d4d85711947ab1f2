"""What a fault did to a run: its result, the exit statuses that it may lead to, and the table of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .random_faults import SIGNALS, Fault


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """The result of a fault; `violations` are the invariants that did not hold."""

    fault: Fault
    target: str  # the process, file or device that it hit
    status: int
    seconds: float | None  # from the fault to the end of the last process; None where the run trained on
    trained: bool  # to its end, in spite of the fault
    violations: tuple[str, ...]
    says: str  # the last line that it printed


def allowed_statuses(fault: Fault | None, target: str, runs: str) -> set[int]:
    """Return the exit statuses that a fault may lead to; with 0 the run must have trained, which is checked apart.

    Over hosts, the ranks save and stop when their launcher dies: 75. The command itself can be ended before it handles signals, and an
    ssh before it has uploaded its files.
    """
    kind = fault.kind if fault else "none"
    if target == "fit" and kind in ("kill", "term"):
        return {-9, 0} if kind == "kill" else {0, 75, 143, -15}
    if target == "ssh" and kind == "term":
        return {0, 1, 75, 143}
    saves = {75} if runs == "hosts" and target != "rank" else set[int]()
    # fmt: off
    return {
        "kill": {0, 1} | saves, "term": {0, 75, 143}, "stop": {0, 1} | saves, "truncated": {0}, "flipped": {0}, "full": {0, 1},
        "nan": {1}, "slow": {0}, "deleted": {0}, "cut": {0, 1}, "none": {0},
    }[kind]
    # fmt: on


def result_table(results: Sequence[FaultResult]) -> Iterator[str]:
    """Yield a line for each kind of fault and process that it hit."""
    heads = f"{'number':>7}{'trained':>9}{'stopped':>9}{'failed':>8}{'median':>8}{'max':>7}  seconds until the last process ended"
    yield f"{'fault':<11}{'of':<10}{heads}"
    groups: dict[tuple[str, str], list[FaultResult]] = {}
    for each in results:
        target = each.target if each.fault.kind in SIGNALS else ""
        groups.setdefault((each.fault.kind, target), []).append(each)
    for (kind, target), group in sorted(groups.items()):
        counts = [sum(each.trained for each in group), sum(each.status in (75, 143) for each in group)]
        counts.append(len(group) - sum(counts))
        times = [each.seconds for each in group if each.seconds is not None and each.fault.kind in ("kill", "term", "stop", "cut")]
        cells = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        yield f"{kind:<11}{target:<10}{len(group):>7}{counts[0]:>9}{counts[1]:>9}{counts[2]:>8}{cells[0]:>8}{cells[1]:>7}"
