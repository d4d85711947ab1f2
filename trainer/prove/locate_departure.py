"""Locates where a layout first departs: trains it and one process again, with the steps in question traced module by module."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .first_departure import TensorDifference, agreement, departure_sentence, first_departure, read_differences
from .fork_client import JobResult
from .judge import FigureDeparture
from .trials.trial import Trial, write_run_folder

TRACED_SUFFIX = ".traced"  # of the names of traced runs
RECORDING = "recording"  # the folder to which one process writes all that it computes

RunTrial = Callable[[Trial], JobResult]


def locate_departure(reference: Trial, trial: Trial, step: int, figures: Sequence[FigureDeparture], run_trial: RunTrial) -> str:
    """Trace a layout; the step, micro-batch, module and rank of the first difference beyond rounding, in words. Raises ServerGone.

    `step` (from 1) is where its curve departs, in `figures`: that one is traced, the one before, which may have moved weights wrongly,
    and the first.
    """
    steps = sorted({0, max(0, step - 2), step - 1})
    one_process, layout = traced_trial(reference), traced_trial(trial)
    folder = one_process.folder / RECORDING
    if not has_recording(one_process.folder, steps) and not _trace(one_process, steps, folder, run_trial):
        return f"not traced: one process failed when it was trained again; its logs are in {one_process.folder}"
    if not _trace(layout, steps, folder, run_trial):
        return f"not traced: it failed when it was trained again; its logs are in {layout.folder}"
    differences = _all_differences(layout.folder)
    departure = first_departure(differences, trial.run.train.precision, trial.run.optim.moments)
    if reported := [each for each in figures if each.step == step and (departure is None or departure.step >= step)]:
        return f"first: {reported_sentence(reported, differences)}"
    numbers = ", ".join(str(each + 1) for each in steps)
    if departure is None:
        return f"no module departs by more than rounding in step {numbers}"
    return f"first: {departure_sentence(departure, differences)}"


def has_recording(folder: Path, steps: Iterable[int]) -> bool:
    """Whether a run of one process has recorded all of these steps. After the last one it writes the weights alone that the next begins
    with."""
    try:
        traced = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["steps"]
    except FileNotFoundError:
        return False
    return set(steps) <= set(traced) and (folder / RECORDING / f"step_{max(traced) + 1}").is_dir()


def reported_sentence(reported: Sequence[FigureDeparture], differences: Sequence[TensorDifference]) -> str:
    """The sentence for figures that depart in a step in which everything that they are computed from agrees."""
    step = reported[0].step
    share = agreement(differences, step - 1, ("output", "output_gradient", "gradient"))
    within = f"(within {share:.0e} of the largest value)"
    if [each.noun for each in reported] == ["gradient norm"]:
        return f"step {step}: gradients agree {within}, their norm does not: it is {reported[0].apart:.1e} of it off"
    nouns = " and ".join(each.noun for each in reported)
    verb, apart = "do" if len(reported) > 1 else "does", " and ".join(f"{each.apart:.1e}" for each in reported)
    return f"step {step}: outputs and gradients agree {within}, the reported {nouns} {verb} not: off by {apart}"


def remove_recording(reference: Trial) -> None:
    """Remove what one process wrote for the traces, which is large."""
    shutil.rmtree(traced_trial(reference).folder, ignore_errors=True)


def traced_trial(trial: Trial) -> Trial:
    """The same run under another name, so that its trace has a folder of its own."""
    return replace(trial, run=replace(trial.run, name=f"{trial.run.name}{TRACED_SUFFIX}"))


def _trace(trial: Trial, steps: Iterable[int], recording: Path, run_trial: RunTrial) -> bool:
    """Train a run under a trace up to the last of the steps; whether all its ranks succeeded."""
    write_run_folder(trial)
    (trial.folder / "trace.json").write_text(json.dumps({"steps": list(steps), "recording": str(recording)}), encoding="utf-8")
    return not any(run_trial(trial).codes)


def _all_differences(folder: Path) -> list[TensorDifference]:
    """The differences that all ranks of a traced run recorded."""
    files = sorted((folder / "departure").glob("*.json"))
    return [each for file in files for each in read_differences(json.loads(file.read_text(encoding="utf-8")))]
