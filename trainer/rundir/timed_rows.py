"""The logged steps of a run whose times are compared with its plan, and the plan of such a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from .read_files import finite_number, nested_value


@dataclass(frozen=True, kw_only=True)
class TimedRows:
    """The rows whose times are compared, with the fields of MeasuredRun that say which they are, and the plan of such a step."""

    steady: Sequence[Mapping[str, float]]
    plan: dict[str, Any]
    batch: int | None
    whole_batch: bool
    is_warm: bool
    planned_since: int | None


def timed_rows(run: Mapping[str, Any], plan: dict[str, Any], rows: Sequence[Mapping[str, float]]) -> TimedRows:
    """The rows whose times are compared, and the plan of such a step."""
    ramps = nested_value(run, "train", "rampup", "batch") is not None
    timed = [row for row in rows if "seconds" in row]
    of_plan = _rows_of_last_plan(timed, ramps=ramps)
    steady = of_plan[1:] or of_plan  # without the first, which includes warming up
    batch = max((int(row["batch"]) for row in steady if "batch" in row), default=None) if ramps else None
    whole_batch = batch in (None, nested_value(run, "train", "batch"))
    if batch is not None:  # steps of one batch are compared with a planned step of it
        steady = [row for row in steady if row.get("batch") == batch]
        plan = plan if whole_batch else {**plan, **_times_of_batch(plan, run, batch)}
    else:  # a run that ramped up before has rows with smaller batches
        steady = [row for row in steady if "batch" not in row]
    return TimedRows(
        steady=steady,
        plan=plan,
        batch=batch,
        whole_batch=whole_batch,
        is_warm=len(of_plan) != 1,
        planned_since=int(of_plan[0]["step"]) if len(of_plan) < len(timed) else None,
    )


def _rows_of_last_plan(rows: Sequence[Mapping[str, float]], *, ramps: bool) -> list[Mapping[str, float]]:
    """The last rows that have the same planned figures: those of the plan that is compared. A run that resumes in another layout has
    another plan. Where the batch `ramps` up, each batch has its planned seconds."""
    figures = ("planned_memory_peak",) if ramps else ("planned_memory_peak", "planned_seconds")
    return list(takewhile(lambda row: all(row.get(each) == rows[-1].get(each) for each in figures), reversed(rows)))[::-1]


def _times_of_batch(plan: Mapping[str, Any], run: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """The planned times of a step of a batch smaller than train.batch: its seconds, not their parts, and its rates."""
    levels = nested_value(plan, "run", "levels")
    steps = [nested_value(each, "step") for each in levels if nested_value(each, "batch") == batch] if isinstance(levels, list) else []
    step, whole = finite_number(next(iter(steps), None)), finite_number(nested_value(plan, "time", "step"))
    of = finite_number(nested_value(run, "train", "batch"))
    slower = batch / of * whole / step if step and whole and of else None  # by what its rates are lower
    rates = {key: finite_number(nested_value(plan, "throughput", key)) for key in ("tokens_per_second", "mfu")}
    scaled = {key: rate * slower for key, rate in rates.items() if rate is not None and slower is not None}
    return {"time": {"step": step}, "throughput": scaled, "traffic": [], "step_low": None, "step_high": None}
