"""A run's measured figures beside its planned ones, read from its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ..spec.numbers.as_text import plural
from .checkpoints import checkpoint_steps, checkpoints_folder
from .files import LAUNCH_FILES
from .metric_rows import ACCURACY_KEY, AVERAGED_KEY, VALIDATION_KEY, figures_of_sets, is_step_row
from .read_files import finite_number, nested_value, read_lines, read_mapping, read_rows, whole_number
from .run_in_manifest import RUN_KEY
from .run_summary import is_config, newest_saved_step, planned_steps
from .saves_and_restarts import RecordedSave, RestartReason, SavesInAll, median_pause, recorded_saves, restart_reasons, saves_in_all
from .slow_devices import SlowDevice, slow_devices

Unit = Literal["bytes", "seconds", "rate", "share"]
SNAPSHOT = "snapshot"  # kind of planned bytes on the host that a step's count does not include
Rows = Sequence[Mapping[str, Any]]

FigureCurve = tuple[str, tuple[tuple[int, float], ...]]  # the name of a validation set, "" of the text that is held out; a figure by step
FigureCurves = tuple[FigureCurve, ...]


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


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as its folder tells it. `report --json` prints these fields by their names."""

    name: str
    steps: int  # trained
    whole: int  # planned
    starts: int  # attempts
    restarts: tuple[tuple[int, int], ...]  # after machine faults: (step at which it went on, steps lost)
    skipped: int  # steps skipped because a loss or gradient was not finite
    skipped_spikes: int  # steps skipped because a loss or norm was far above those before
    spikes: int  # such losses of steps that were taken
    goodput: float | None  # share of the last `fit`'s time spent in steps that count
    again: tuple[tuple[int, int], ...]  # (last step logged, first step that the next attempt logged) where steps were done twice
    saved: tuple[int, ...]
    device: str
    entropy: float | None  # of single tokens of the training text, nats
    memory: tuple[PlannedMeasured, ...]
    time: tuple[PlannedMeasured, ...]
    speed: tuple[PlannedMeasured, ...]
    resident: int | None  # peak bytes of the process, including all that is not a tensor; on a GPU, of its allocator
    losses: tuple[tuple[int, float], ...]
    validation: tuple[tuple[int, float], ...]  # of the text that is held out, else of the first validation set
    step_bar: tuple[float, float] | None = None  # seconds between which the plan expects nine runs in ten
    is_warm: bool = True  # whether times leave out the first steps, which warm up
    planned_since: int | None = None  # of a run whose plan changed: the first step logged under the last one; times are from it on
    lost: int = 0  # logged steps with a loss that was not finite, besides skipped ones
    damaged: tuple[str, ...] = ()  # files that can't be read as `fit` writes them
    missing: tuple[str, ...] = ()  # files that every `fit` writes
    tokens_per_second: tuple[tuple[int, float], ...] = ()  # by step
    slow: tuple[SlowDevice, ...] = ()
    saves: SavesInAll = field(default_factory=SavesInAll)
    saving: tuple[PlannedMeasured, ...] = ()  # of one save
    restart_reasons: tuple[RestartReason, ...] = ()  # of each restart, also of those that reached no step
    batch: int | None = None  # of a run that ramps its batch up: sequences of the steps whose times are compared, its largest so far
    whole_batch: bool = True  # whether it is train.batch
    loss_unit: str = "nats a token"
    accuracy: float | None = None  # of a run on preferences: the share of pairs in order at its last step
    validations: FigureCurves = ()
    averaged: FigureCurves = ()  # losses of the average of the weights
    accuracies: FigureCurves = ()  # of preferences: the share of pairs in order


@dataclass(frozen=True, kw_only=True)
class _TimedRows:
    """The rows whose times are compared, with the fields of MeasuredRun that say which they are, and the plan of such a step."""

    steady: Sequence[Mapping[str, float]]
    plan: dict[str, Any]
    batch: int | None
    whole_batch: bool
    is_warm: bool
    planned_since: int | None


def read_measured_run(folder: Path) -> MeasuredRun:
    """Read RUN_DIR; what is missing or damaged there is None or empty. Without its run.json the run is what its newest checkpoint says."""
    damaged = list[str]()
    run, plan, counted = (_read_object(folder / name, damaged) for name in ("run.json", "plan.json", "measured.json"))
    if run and not is_config(run):
        damaged.append("run.json")
        run = {}
    newest, skipped = newest_saved_step(folder)
    written_files = (*LAUNCH_FILES, "metrics.jsonl") if newest else LAUNCH_FILES  # a run that has just begun has no metrics
    if not run and newest is not None:
        recorded = newest.extra.get(RUN_KEY)
        run = recorded if isinstance(recorded, dict) else {}
    written = list(read_rows(folder / "metrics.jsonl"))
    # a last line without its end is being written, or a crash cut it short
    unreadable = sum(line.endswith(b"\n") and bool(line.strip()) for line in read_lines(folder / "metrics.jsonl")) - len(written)
    if unreadable > 0:
        damaged.append(f"{plural(unreadable, 'line')} of metrics.jsonl" if written else "metrics.jsonl")
    damaged += [f"checkpoint {reason}" for reason in skipped]
    of_steps = [row for row in written if is_step_row(row)]
    logged = [row for row in map(_numbers, of_steps) if "step" in row]
    rows = list({int(row["step"]): row for row in logged}.values())  # of a step done twice, the last time
    last = list({step: row for row in of_steps if (step := whole_number(row.get("step"))) is not None}.values())
    timed = _timed_rows(run, plan, rows)
    plan, steady = timed.plan, timed.steady
    name, again = run.get("name"), pairwise(int(row["step"]) for row in logged)
    logged_steps, saves = max((int(row["step"]) for row in rows), default=0), tuple(recorded_saves(written))
    reasons = tuple(restart_reasons(written))
    skipped_spikes = sum("skipped" in row and ("spike" in row or "norm_spike" in row) for row in last)
    validations, averaged, accuracies = (tuple(_validation_curves(rows, each)) for each in (VALIDATION_KEY, AVERAGED_KEY, ACCURACY_KEY))
    return MeasuredRun(
        name=name if isinstance(name, str) else folder.name,
        steps=max(logged_steps, newest.step if newest else 0),
        whole=planned_steps(plan, run) or 0,
        starts=sum(line.startswith(b"== rank 0 of ") for line in read_lines(folder / "ranks" / "0.log")),
        restarts=tuple((each.step, each.lost) for each in reasons if each.step is not None and each.lost is not None),
        skipped=sum("skipped" in row for row in last) - skipped_spikes,
        skipped_spikes=skipped_spikes,
        spikes=sum("spike" in row and "skipped" not in row for row in last),
        goodput=next((each for row in reversed(written) if (each := finite_number(row.get("goodput"))) is not None), None),
        again=tuple((one, two) for one, two in again if two <= one),
        saved=tuple(_saved_steps(checkpoints_folder(folder))),
        device=str(plan.get("device", "")),
        entropy=finite_number(counted.get("unigram_entropy")),
        memory=tuple(_memory(plan, counted, nested_value(run, "train", "batch"))),
        time=tuple(_time(plan, run, steady)),
        speed=tuple(_speed(plan, steady)),
        resident=max((int(row["memory_peak"]) for row in steady if row.get("memory_peak")), default=None),
        losses=tuple((int(row["step"]), row["loss"]) for row in rows if "loss" in row),
        validation=dict(validations).get("", validations[0][1]) if validations else (),
        validations=validations,
        averaged=averaged,
        accuracies=accuracies,
        step_bar=_step_bar(plan),
        is_warm=timed.is_warm,
        planned_since=timed.planned_since,
        lost=sum(row.get("loss", 0) is None and "skipped" not in row for row in last),
        damaged=tuple(damaged),
        missing=tuple(name for name in written_files if not os.path.lexists(folder / name)),
        slow=tuple(slow_devices(written)),
        saves=saves_in_all(saves),
        saving=tuple(_saving(plan, saves)),
        restart_reasons=reasons,
        tokens_per_second=tuple((int(row["step"]), row["tokens_per_second"]) for row in rows if "tokens_per_second" in row),
        batch=timed.batch,
        whole_batch=timed.whole_batch,
        loss_unit="of a pair of answers" if nested_value(run, "data", "name") == "preferences" else "nats a token",
        accuracy=next((row["accuracy"] for row in reversed(rows) if "accuracy" in row), None),
    )


def _timed_rows(run: Mapping[str, Any], plan: dict[str, Any], rows: Sequence[Mapping[str, float]]) -> _TimedRows:
    """The rows whose times are compared, and the plan of such a step."""
    ramps = nested_value(run, "train", "rampup", "batch") is not None
    timed = [row for row in rows if "seconds" in row]
    of_plan = _rows_of_last_plan(timed, ramps=ramps)
    steady = of_plan[1:] or of_plan  # without the first, which includes warming up
    batch = max((int(row["batch"]) for row in steady if "batch" in row), default=None) if ramps else None
    whole_batch = batch in (None, nested_value(run, "train", "batch"))
    if batch is not None:  # steps of one batch are compared with a planned step of it
        steady = [row for row in steady if row.get("batch") == batch]
        plan |= {} if whole_batch else _times_of_batch(plan, run, batch)
    else:  # a run that ramped up before has rows with smaller batches
        steady = [row for row in steady if "batch" not in row]
    return _TimedRows(
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


def _validation_curves(rows: Sequence[Mapping[str, float]], figure: str) -> Iterator[FigureCurve]:
    """The name and a figure by step of each validation set, that of the text that is held out first."""
    figures = [(int(row["step"]), figures_of_sets(row, figure)) for row in rows]
    for name in sorted(dict.fromkeys(name for _, found in figures for name in found), key=bool):
        yield name, tuple((step, found[name]) for step, found in figures if name in found)


def _saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, ascending; none where the folder can't be read."""
    with suppress(OSError):
        return sorted(checkpoint_steps(folder))
    return []


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a row; its step only where it is a count."""
    found = {key: each for key, value in row.items() if (each := finite_number(value)) is not None}
    if whole_number(row.get("step")) is None:
        found.pop("step", None)
    return found


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


def _memory(plan: Mapping[str, Any], counted: Mapping[str, Any], batch: Any) -> Iterator[PlannedMeasured]:
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
        found = [each for rank in counted.get("ranks") or () if (each := finite_number(nested_value(rank, "host"))) is not None]
        yield PlannedMeasured(name="on the host", unit="bytes", planned=sum(kinds), measured=max(found) if found else None)


def _ranks_of_stage(plan: Mapping[str, Any], counted: Mapping[str, Any], stage: Any) -> Sequence[Any]:
    """The bytes of each rank of a stage, whose ranks are neighbours: pp is the outermost axis of the mesh."""
    ranks, stages = counted.get("ranks"), whole_number(nested_value(plan, "mesh", "pp"))
    if not isinstance(ranks, list) or not stages or whole_number(stage) is None:
        return ()
    each = len(ranks) // stages
    return ranks[stage * each : (stage + 1) * each]


def _time(plan: Mapping[str, Any], run: Mapping[str, Any], rows: Rows) -> Iterator[PlannedMeasured]:
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


def _step_bar(plan: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = (finite_number(plan.get(key)) for key in ("step_low", "step_high"))
    return (low, high) if low is not None and high is not None else None


def _saving(plan: Mapping[str, Any], saves: Sequence[RecordedSave]) -> Iterator[PlannedMeasured]:
    """Seconds of a save, and for how many of them training waits."""
    planned = [finite_number(nested_value(plan, "saving", key)) for key in ("seconds", "pause")]
    yield PlannedMeasured(name="save", unit="seconds", planned=planned[0], measured=saves_in_all(saves).seconds)
    yield PlannedMeasured(name="pause of a save", unit="seconds", planned=planned[1], measured=median_pause(saves))


def _speed(plan: Mapping[str, Any], rows: Rows) -> Iterator[PlannedMeasured]:
    figures: tuple[tuple[str, str, Unit], ...] = (("tokens_per_second", "tokens/s", "rate"), ("mfu", "MFU", "share"))
    for key, name, unit in figures:
        planned = finite_number(nested_value(plan, "throughput", key))
        yield PlannedMeasured(name=name, unit=unit, planned=planned, measured=_median(rows, key))


def _median(rows: Rows, key: str) -> float | None:
    found = [row[key] for row in rows if row.get(key) is not None]
    return median(found) if found else None


def _read_object(file: Path, damaged: list[str]) -> dict[str, Any]:
    """The JSON object in a file, {} where the file is missing; a damaged file is added to `damaged`."""
    try:
        found = read_mapping(file)
    except FileNotFoundError:
        return {}
    if found is None:
        damaged.append(file.name)
    return found or {}
