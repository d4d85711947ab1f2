"""Planned figures of a run beside measured ones: memory by kind, seconds of a step and its parts, rates, saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from .read_files import finite_number, nested_value, whole_number
from .saves_and_restarts import RecordedSave, median_pause, saves_in_all

Unit = Literal["bytes", "seconds", "rate", "share"]
SNAPSHOT = "snapshot"  # kind of planned bytes on the host that a step's count does not include
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PlannedMeasured:
    """A figure as planned and as measured, in SI units; None where it is not known."""

    name: str
    unit: Unit
    planned: float | None
    measured: float | None

    @property
    def drift(self) -> float | None:
        """By what share of the planned figure the measured one is higher."""
        return self.measured / self.planned - 1 if self.planned and self.measured is not None else None


def compared_memory(plan: Mapping[str, Any], counted: Mapping[str, Any], batch: Any) -> Iterator[PlannedMeasured]:
    """Bytes by kind of the planned fullest stage: of its rank that holds most. Logits count as saved activations. What steps of a batch
    smaller than train.batch hold of activations and gradients is not planned: a pipeline has fewer micro-batches under way."""
    stage = nested_value(plan, "memory", "stage")
    held, ranks = nested_value(plan, "memory", "stages", stage, "bytes"), _ranks_of_stage(plan, counted, stage)
    for kind in ("weights", "gradients", "optimizer", "activations"):
        planned = finite_number(nested_value(held, kind))
        if planned is not None and kind == "activations":
            unknown = nested_value(plan, "memory", "unknown")
            is_unknown = isinstance(unknown, list) and kind in unknown
            planned = None if is_unknown else planned + (finite_number(nested_value(held, "logits")) or 0)
        if kind in ("activations", "gradients") and counted.get("batch", batch) != batch:
            planned = None
        found = [each for each in (finite_number(nested_value(rank, kind)) for rank in ranks) if each is not None]
        measured = max(found) if found else finite_number(nested_value(counted, "memory", kind))
        yield PlannedMeasured(name=kind, unit="bytes", planned=planned, measured=measured)
    on_host = nested_value(plan, "memory", "host", "rank")
    kinds = [finite_number(size) or 0 for kind, size in on_host.items() if kind != SNAPSHOT] if isinstance(on_host, dict) else []
    if any(kinds):
        found = [each for rank in _ranks(counted) if (each := finite_number(nested_value(rank, "host"))) is not None]
        yield PlannedMeasured(name="on the host", unit="bytes", planned=sum(kinds), measured=max(found) if found else None)


@dataclass(frozen=True, kw_only=True)
class ExpertRanksLoad:
    """The copies of tokens that the busiest rank of experts of the planned fullest stage computed in the step whose bytes were counted,
    over an even share, and the bytes of activations that are planned for that load (loop/measure/expert_rank_load.py)."""

    load: float
    activations: float


def expert_ranks_load(counted: Mapping[str, Any]) -> ExpertRanksLoad | None:
    """Read it from measured.json; None where no ranks share out experts."""
    load, planned = (finite_number(nested_value(counted, "expert_ranks", key)) for key in ("load", "activations"))
    return ExpertRanksLoad(load=load, activations=planned) if load and planned else None


def _ranks_of_stage(plan: Mapping[str, Any], counted: Mapping[str, Any], stage: Any) -> Sequence[Any]:
    """The bytes of each rank of a stage, whose ranks are neighbours: pp is the outermost axis of the mesh."""
    ranks, stages = _ranks(counted), whole_number(nested_value(plan, "mesh", "pp"))
    if not stages or whole_number(stage) is None:
        return ()
    each = len(ranks) // stages
    return ranks[stage * each : (stage + 1) * each]


def _ranks(counted: Mapping[str, Any]) -> Sequence[Any]:
    """The bytes of each rank; none where they are not recorded."""
    ranks = counted.get("ranks")
    return ranks if isinstance(ranks, list) else ()


def compared_times(plan: Mapping[str, Any], run: Mapping[str, Any], rows: Rows) -> Iterator[PlannedMeasured]:
    """Seconds of a step and its parts. ZeRO 1 and 2 gather weights in the optimizer step, during which the host does what it does once a
    step; all other traffic is in the passes."""
    yield PlannedMeasured(
        name="step", unit="seconds", planned=finite_number(nested_value(plan, "time", "step")), measured=_median(rows, "seconds")
    )
    gathers, messages = nested_value(run, "parallel", "zero") in (1, 2), plan.get("traffic")
    late = sum(
        finite_number(nested_value(each, "exposed")) or 0.0
        for each in (messages if isinstance(messages, list) else ())
        if gathers and nested_value(each, "verb") == "all_gather"
    )
    planned: dict[str, float | None] = {"data": 0.0, "forward and backward": None, "optimizer step": None}
    parts = [finite_number(nested_value(plan, "time", key)) for key in ("compute", "exposed", "bubble", "optimizer")]
    if None not in parts:
        compute, exposed, bubble, optimizer = (each or 0.0 for each in parts)
        planned["forward and backward"] = compute + exposed + bubble - late
        planned["optimizer step"] = optimizer + late + (finite_number(nested_value(plan, "time", "host")) or 0.0)
    forward, backward = _median(rows, "seconds_forward"), _median(rows, "seconds_backward")
    passes = forward + backward if forward is not None and backward is not None else None
    found = {"data": _median(rows, "seconds_data"), "forward and backward": passes, "optimizer step": _median(rows, "seconds_step")}
    if passes is not None:
        yield from (PlannedMeasured(name=name, unit="seconds", planned=planned[name], measured=found[name]) for name in planned)


def compared_rates(plan: Mapping[str, Any], rows: Rows) -> Iterator[PlannedMeasured]:
    figures: tuple[tuple[str, str, Unit], ...] = (("tokens_per_second", "tokens/s", "rate"), ("mfu", "MFU", "share"))
    for key, name, unit in figures:
        planned = finite_number(nested_value(plan, "throughput", key))
        yield PlannedMeasured(name=name, unit=unit, planned=planned, measured=_median(rows, key))


def compared_saves(plan: Mapping[str, Any], saves: Sequence[RecordedSave]) -> Iterator[PlannedMeasured]:
    """Seconds of a save, and for how many of them training waits."""
    planned = [finite_number(nested_value(plan, "saving", key)) for key in ("seconds", "pause")]
    yield PlannedMeasured(name="save", unit="seconds", planned=planned[0], measured=saves_in_all(saves).seconds)
    yield PlannedMeasured(name="pause of a save", unit="seconds", planned=planned[1], measured=median_pause(saves))


def step_bar(plan: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = (finite_number(plan.get(key)) for key in ("step_low", "step_high"))
    return (low, high) if low is not None and high is not None else None


def _median(rows: Rows, key: str) -> float | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return median(found) if found else None
