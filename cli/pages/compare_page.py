"""`distrain report A B ...`: several runs side by side: what differs between them, their losses and speeds, one chart of all curves."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...trainer.rundir.measured_run import MeasuredRun, read_measured_run
from ...trainer.rundir.planned_measured import PlannedMeasured
from ...trainer.spec.problem import one_line
from ...trainer.spec.read import value_text
from .loss_chart import SHARED_CELL, Points, comparison_chart
from .report_page import figure_text, headline, validation_words
from .text_layout import Style, evenly_spaced, page_width, table, wrap

MARKS = string.ascii_uppercase + string.ascii_lowercase  # one for each run, in the order given
NOT_COMPARED = (
    "name",
    "reading",
    "log.dir",
    "model.parameters",
    "parallel.actions",
)  # keys that do not change what is trained, and one that is too long
TOGETHER = "these together"  # the row of the sum of those above it
MAX_STEPS = 8  # rows of a table of losses
NO_COMMON_STEP = "no step was logged by all of them"
SAME_CONFIGS = "nothing: their configs are the same"


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of several runs: its mark, its folder as the user gave it, its config by dotted keys, its figures."""

    mark: str
    given: str
    config: Mapping[str, Any]
    measured: MeasuredRun


def compared_runs(given: Sequence[Path], folders: Sequence[Path]) -> list[ComparedRun]:
    """Read runs and give them marks; `given` are the folders as the user gave them."""
    return [
        ComparedRun(mark=mark, given=one_line(str(path)), config=config_of(folder), measured=read_measured_run(folder))
        for mark, path, folder in zip(MARKS, given, folders, strict=False)
    ]


def config_of(folder: Path) -> dict[str, Any]:
    """The config in RUN_DIR/run.json by dotted keys; empty where it can't be read."""
    with suppress(OSError, ValueError, RecursionError):
        read = json.loads((folder / "run.json").read_bytes())
        return dict(_flat_items(read)) if isinstance(read, dict) else {}
    return {}


def comparison_text(runs: Sequence[ComparedRun], style: Style) -> str:
    """The page of several runs."""
    losses, named = [run.measured.losses for run in runs], validation_names(runs)
    validations = {name: [dict(run.measured.validations).get(name, ()) for run in runs] for name in named}
    drawn = comparison_chart({run.mark: run.measured.losses for run in runs}, style)
    sections = {
        "": _legend_lines(runs),
        "What differs": _difference_lines(runs),
        "Loss, nats a token": _loss_lines(runs, losses),
        **{validation_heading(name): _loss_lines(runs, curves) for name, curves in validations.items()},
        "Measured, and (planned)": _side_by_side(runs, figure_rows(runs)),
        f"Loss over steps{f'; {SHARED_CELL}: several' if any(SHARED_CELL in line for line in drawn) else ''}": drawn,
    }
    parts = [[*([style.paint(title, "bold")] if title else []), *lines] for title, lines in sections.items() if lines]
    return "\n\n".join("\n".join(lines) for lines in parts)


def config_differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The keys whose values differ, each with its value in every run; "-" where a run has no such key."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NOT_COMPARED)
    rows = {key: [one_line(value_text(run.config[key])) if key in run.config else "-" for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def validation_names(runs: Sequence[ComparedRun]) -> list[str]:
    """The names of the validation sets of any run, "" of the text that is held out first."""
    return sorted(dict.fromkeys(name for run in runs for name, _ in run.measured.validations), key=bool)


def validation_heading(name: str) -> str:
    """The heading of the losses of a validation set."""
    return validation_words(name).replace("validation", "Validation", 1)


def common_steps(curves: Sequence[Points]) -> list[int]:
    """The steps that all curves share, in order; empty curves do not count."""
    steps = [{step for step, _ in curve} for curve in curves if curve]
    return sorted(set.intersection(*steps)) if steps else []


def progress(run: ComparedRun) -> str:
    """The steps and losses of a run."""
    return headline(run.measured).removeprefix(f"{one_line(run.measured.name)}: ")


class LowestLoss(NamedTuple):
    """The lowest loss of several runs at the last step that all logged: of what ("validation loss"), the step, the run, the loss."""

    words: str
    step: int
    run: str
    loss: float


def lowest_loss(runs: Mapping[str, MeasuredRun]) -> LowestLoss | None:
    """Return the lowest loss: of the first validation set that all have, else of training; None where none is lower."""
    sets = [dict(run.validations) for run in runs.values()]
    shared = next((name for name in sets[0] if all(each.get(name) for each in sets)), None) if sets else None
    curves = [run.losses for run in runs.values()] if shared is None else [each[shared] for each in sets]
    steps = common_steps(curves) if all(curves) else []
    last = {name: dict(curve)[steps[-1]] for name, curve in zip(runs, curves, strict=True)} if steps else {}
    if len({f"{loss:.4f}" for loss in last.values()}) < 2:
        return None
    best = min(last, key=lambda name: last[name])
    return LowestLoss("loss" if shared is None else validation_words(shared), steps[-1], best, last[best])


def lowest_loss_text(runs: Sequence[ComparedRun]) -> str:
    """Which run has the lowest loss, in words; "" where none has."""
    if (found := lowest_loss({run.mark: run.measured for run in runs})) is None:
        return ""
    return f"Lowest {found.words} at step {found.step:,}, the last that all logged: {found.run}, {found.loss:.4f}"


def _legend_lines(runs: Sequence[ComparedRun]) -> list[str]:
    lines = [line for run in runs for line in wrap(f"{run.mark}  {run.given}: {progress(run)}", hang="   ")]
    return [*lines, *(wrap(best, hang="  ") if (best := lowest_loss_text(runs)) else [])]


def _difference_lines(runs: Sequence[ComparedRun]) -> list[str]:
    return _side_by_side(runs, config_differences(runs)) or [f"  {SAME_CONFIGS}"]


def _loss_lines(runs: Sequence[ComparedRun], curves: Sequence[Points]) -> list[str]:
    headings, rows = loss_rows(runs, curves)
    if not rows:
        return [f"  {NO_COMMON_STEP}"]
    if len(headings) == len(runs):
        return _side_by_side(runs, rows)
    return [f"  {line}" for line in table([["", *headings], *([name, *values] for name, values in rows.items())])]


def loss_rows(runs: Sequence[ComparedRun], curves: Sequence[Points]) -> tuple[list[str], dict[str, list[str]]]:
    """The headings, and losses by step, at the steps that all runs with losses logged; for two such runs their difference too."""
    steps, losses = evenly_spaced(common_steps(curves), MAX_STEPS), [dict(curve) for curve in curves]
    headings = [run.mark for run in runs]
    rows = {f"step {step:,}": [f"{each[step]:.4f}" if each else "-" for each in losses] for step in steps}
    if len(runs) == 2 and all(losses):
        headings.append(f"{runs[1].mark} - {runs[0].mark}")
        for step, values in zip(steps, rows.values(), strict=True):
            values.append(f"{losses[1][step] - losses[0][step]:+.4f}")
    return headings, rows


def figure_rows(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The bytes of each kind of tensor, the time and the throughput of every run: as measured (as planned)."""
    figures = [(*run.measured.memory, _kinds_together(run.measured), *run.measured.time, *run.measured.speed) for run in runs]
    kinds = dict.fromkeys(each.name for run in runs for each in run.measured.memory)
    rows: dict[str, list[str]] = {}
    for name in (*kinds, TOGETHER, "step", "tokens/s", "MFU"):
        found = [next((each for each in some if each.name == name), None) for some in figures]
        rows[name] = [_measured_and_planned(each) if each else "-" for each in found]
    return rows


def _kinds_together(run: MeasuredRun) -> PlannedMeasured:
    """The bytes of the kinds of tensors that are measured, less than a plan's memory: it counts buffers and temporary tensors too."""
    planned, measured = [each.planned for each in run.memory], [each.measured for each in run.memory]
    return PlannedMeasured(name=TOGETHER, unit="bytes", planned=_sum(planned), measured=_sum(measured))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def _measured_and_planned(each: PlannedMeasured) -> str:
    return f"{figure_text(each, each.measured)} ({figure_text(each, each.planned)})"


def _side_by_side(runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A table with a row a name and a column a run; on a page too narrow for it, a line a value."""
    if not rows:
        return []
    lines = table([["", *(run.mark for run in runs)], *([name, *values] for name, values in rows.items())])
    if max(map(len, lines)) + 2 <= page_width():
        return [f"  {line}" for line in lines]
    lines = []
    for name, values in rows.items():
        lines.append(f"  {name}")
        for run, value in zip(runs, values, strict=True):
            lines += wrap(f"{run.mark}  {value}", indent="    ", hang="       ")
    return lines


def _flat_items(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat_items(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
