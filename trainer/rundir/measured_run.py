"""A run's measured figures beside its planned ones, read from its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..spec.numbers.as_text import plural
from .checkpoints import checkpoint_steps, checkpoints_folder
from .files import LAUNCH_FILES
from .metric_rows import ACCURACY_KEY, AVERAGED_KEY, VALIDATION_KEY, figures_of_sets, is_step_row, join_late_validations
from .planned_measured import (
    ExpertRanksLoad,
    PlannedMeasured,
    compared_memory,
    compared_rates,
    compared_saves,
    compared_times,
    expert_ranks_load,
    step_bar,
)
from .read_files import finite_number, nested_value, read_lines, read_mapping, read_rows, whole_number
from .run_in_manifest import RUN_KEY
from .run_summary import is_config, newest_saved_step, planned_steps
from .saves_and_restarts import RestartReason, SavesInAll, recorded_saves, restart_reasons, saves_in_all
from .slow_devices import SlowDevice, slow_devices
from .timed_rows import timed_rows

FigureCurve = tuple[str, tuple[tuple[int, float], ...]]  # the name of a validation set, "" of the text that is held out; a figure by step
FigureCurves = tuple[FigureCurve, ...]


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
    expert_load: tuple[tuple[int, float], ...] = ()  # of a mixture: tokens of its busiest expert, over the mean of its layer, by step
    busiest_layer: int | None = None  # where that expert is at the last step, numbered as in weights' names
    ep_load: tuple[tuple[int, float], ...] = ()  # of a mixture: tokens of its busiest rank of experts, over an even share, by step
    expert_ranks: ExpertRanksLoad | None = None  # of the step whose bytes were counted
    idle_experts: int | None = None  # experts, of all layers, that no token of the last logged step chose
    dropped_copies: tuple[tuple[int, float], ...] = ()  # share of the tokens' copies beyond model.capacity, by step
    router_loss: tuple[tuple[int, float], ...] = ()  # what the routers' losses add to the loss, in its unit, by step
    without_core: float | None = None  # share of a median step, of those whose times are compared, that rank 0 had no core; None: unknown


@dataclass(frozen=True, kw_only=True)
class _StepRows:
    """The rows of metrics.jsonl. Of a step that was done twice, `steps` and `figures` have the last time alone."""

    written: Sequence[Mapping[str, Any]]  # of steps and of other events
    steps: Sequence[Mapping[str, Any]]  # as written
    figures: Sequence[Mapping[str, float]]  # their numbers
    again: tuple[tuple[int, int], ...]  # as in MeasuredRun

    @property
    def skipped_spikes(self) -> int:
        """How many steps were skipped because a loss or norm was far above those before."""
        return sum("skipped" in row and ("spike" in row or "norm_spike" in row) for row in self.steps)

    def last_count(self, key: str) -> int | None:
        """A count at the last step that has it; None where none has."""
        return next((int(row[key]) for row in reversed(self.figures) if key in row), None)

    def curve(self, key: str) -> tuple[tuple[int, float], ...]:
        """A figure by step, of the steps that have it."""
        return tuple((int(row["step"]), row[key]) for row in self.figures if key in row)


def read_measured_run(folder: Path) -> MeasuredRun:
    """Read RUN_DIR; what is missing or damaged there is None or empty. Without its run.json the run is what its newest checkpoint says."""
    damaged = list[str]()
    run, plan, counted = (_read_object(folder / name, damaged) for name in ("run.json", "plan.json", "measured.json"))
    if run and not is_config(run):
        damaged.append("run.json")
        run = {}
    newest, unusable = newest_saved_step(folder)
    written_files = (*LAUNCH_FILES, "metrics.jsonl") if newest else LAUNCH_FILES  # a run that has just begun has no metrics
    if not run and newest is not None:
        recorded = newest.extra.get(RUN_KEY)
        run = recorded if isinstance(recorded, dict) else {}
    rows = _read_step_rows(folder, damaged)
    damaged += [f"checkpoint {reason}" for reason in unusable]
    timed = timed_rows(run, plan, rows.figures)
    plan, steady = timed.plan, timed.steady
    saves, reasons = tuple(recorded_saves(rows.written)), tuple(restart_reasons(rows.written))
    validations, averaged, accuracies = (
        tuple(_validation_curves(rows.figures, each)) for each in (VALIDATION_KEY, AVERAGED_KEY, ACCURACY_KEY)
    )
    name = run.get("name")
    return MeasuredRun(
        name=name if isinstance(name, str) else folder.name,
        steps=max([newest.step if newest else 0, *(int(row["step"]) for row in rows.figures)]),
        whole=planned_steps(plan, run) or 0,
        starts=sum(line.startswith(b"== rank 0 of ") for line in read_lines(folder / "ranks" / "0.log")),
        restarts=tuple((each.step, each.lost) for each in reasons if each.step is not None and each.lost is not None),
        skipped=sum("skipped" in row for row in rows.steps) - rows.skipped_spikes,
        skipped_spikes=rows.skipped_spikes,
        spikes=sum("spike" in row and "skipped" not in row for row in rows.steps),
        goodput=next((each for row in reversed(rows.written) if (each := finite_number(row.get("goodput"))) is not None), None),
        again=rows.again,
        saved=tuple(_saved_steps(checkpoints_folder(folder))),
        device=str(plan.get("device", "")),
        entropy=finite_number(counted.get("unigram_entropy")),
        memory=tuple(compared_memory(plan, counted, nested_value(run, "train", "batch"))),
        time=tuple(compared_times(plan, run, steady)),
        without_core=_share_without_core(steady),
        speed=tuple(compared_rates(plan, steady)),
        resident=max((int(row["memory_peak"]) for row in steady if row.get("memory_peak")), default=None),
        losses=rows.curve("loss"),
        validation=dict(validations).get("", validations[0][1]) if validations else (),
        validations=validations,
        averaged=averaged,
        accuracies=accuracies,
        step_bar=step_bar(plan),
        is_warm=timed.is_warm,
        planned_since=timed.planned_since,
        lost=sum(row.get("loss", 0) is None and "skipped" not in row for row in rows.steps),
        damaged=tuple(damaged),
        missing=tuple(name for name in written_files if not os.path.lexists(folder / name)),
        slow=tuple(slow_devices(rows.written)),
        saves=saves_in_all(saves),
        saving=tuple(compared_saves(plan, saves)),
        restart_reasons=reasons,
        tokens_per_second=rows.curve("tokens_per_second"),
        batch=timed.batch,
        whole_batch=timed.whole_batch,
        loss_unit="of a pair of answers" if nested_value(run, "data", "name") == "preferences" else "nats a token",
        expert_load=rows.curve("expert_load"),
        busiest_layer=rows.last_count("busiest_layer"),
        ep_load=rows.curve("ep_load"),
        expert_ranks=expert_ranks_load(counted),
        idle_experts=rows.last_count("idle_experts"),
        dropped_copies=rows.curve("dropped_copies"),
        router_loss=rows.curve("router_loss"),
        accuracy=next((row["accuracy"] for row in reversed(rows.figures) if "accuracy" in row), None),
    )


def _share_without_core(rows: Sequence[Mapping[str, float]]) -> float | None:
    shares = [row["seconds_without_core"] / row["seconds"] for row in rows if "seconds_without_core" in row and row["seconds"] > 0]
    return median(shares) if shares else None


def _read_step_rows(folder: Path, damaged: list[str]) -> _StepRows:
    """Read metrics.jsonl; lines that can't be read are added to `damaged`."""
    file = folder / "metrics.jsonl"
    written = list(read_rows(file))
    # a last line without its end is being written, or a crash cut it short
    unreadable = sum(line.endswith(b"\n") and bool(line.strip()) for line in read_lines(file)) - len(written)
    if unreadable > 0:
        damaged.append(f"{plural(unreadable, 'line')} of {file.name}" if written else file.name)
    steps = join_late_validations(row for row in written if is_step_row(row))
    logged = [row for row in map(_numbers, steps) if "step" in row]
    return _StepRows(
        written=written,
        steps=list({step: row for row in steps if (step := whole_number(row.get("step"))) is not None}.values()),
        figures=list({int(row["step"]): row for row in logged}.values()),
        again=tuple((one, two) for one, two in pairwise(int(row["step"]) for row in logged) if two <= one),
    )


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


def _read_object(file: Path, damaged: list[str]) -> dict[str, Any]:
    """The JSON object in a file, {} where the file is missing; a damaged file is added to `damaged`."""
    try:
        found = read_mapping(file)
    except FileNotFoundError:
        return {}
    if found is None:
        damaged.append(file.name)
    return found or {}
