"""What a published case measured. Only scores read this: predictions never do."""

from __future__ import annotations

from typing import NamedTuple

from .case_runs import Case
from .predict import Prediction

SIZES = {"GiB": 2**30, "GB": 1e9, "MiB": 2**20}


class Score(NamedTuple):
    """A case, its prediction, and planned over measured step seconds and peak bytes (None: not measured, or not planned)."""

    case: Case
    prediction: Prediction
    step: float | None
    memory: float | None


def score(case: Case, prediction: Prediction) -> Score:
    """Compare a prediction with its measurements."""
    seconds, peak = step_seconds(case), peak_bytes(case)
    step = prediction.step_seconds / seconds if seconds and prediction.step_seconds else None
    memory = prediction.memory_peak / peak if peak and prediction.memory_peak else None
    return Score(case, prediction, step, memory)


def step_seconds(case: Case) -> float | None:
    """Return the measured seconds of a step: derived from a rate, or as stated."""
    seconds: float | None = (case.get("derived") or {}).get("iter_time_s") or case["measured"]["iter_time_s"]
    return seconds


def peak_bytes(case: Case) -> float | None:
    """Return the measured peak of memory."""
    measured = case["measured"]
    return measured["peak_mem"] * SIZES[measured["peak_mem_unit"]] if measured["peak_mem"] else None
