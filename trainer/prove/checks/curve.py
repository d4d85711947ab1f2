"""The training curve that a run logged, and the differences of two curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from ...rundir.metric_rows import (
    AVERAGED_KEY,
    VALIDATION_KEY,
    figures_of_sets,
    is_step_row,
    join_late_validations,
    key_of_set,
    main_validation_loss,
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss (nats a token), gradient norm and learning rate of each step, and the losses of the last step's evaluation by their keys in
    rows, if it made one."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]
    evaluations: Mapping[str, float] = field(default_factory=dict)

    @property
    def evaluation(self) -> float | None:
        """The loss that stands for all of the evaluation's."""
        loss: float | None = main_validation_loss(self.evaluations)
        return loss


def read_curve(folder: Path) -> Curve | None:
    """The curve that a run logged in RUN_DIR/metrics.jsonl; None where it logged none."""
    with suppress(OSError, ValueError, KeyError):
        written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = join_late_validations(row for row in written if is_step_row(row))
        evaluations = [found for row in rows if (found := _evaluated_losses(row))]
        return Curve(
            losses=tuple(_number(row["loss"]) for row in rows),
            norms=tuple(_number(row["grad_norm"]) for row in rows),
            rates=tuple(row["lr"] for row in rows),
            evaluations={key: _number(loss) for key, loss in evaluations[-1].items()} if evaluations else {},
        )
    return None


def _evaluated_losses(row: Mapping[str, Any]) -> dict[str, Any]:
    """The validation losses of a row by their keys, with those of the average of the weights behind."""
    return {
        key_of_set(figure, name): loss for figure in (VALIDATION_KEY, AVERAGED_KEY) for name, loss in figures_of_sets(row, figure).items()
    }


def first_step(curve: Curve) -> Curve:
    """The curve up to its first step, without an evaluation."""
    return Curve(losses=curve.losses[:1], norms=curve.norms[:1], rates=curve.rates[:1])


def loss_differences(one: Curve, other: Curve) -> list[float]:
    """The difference of the losses at each step, in nats a token."""
    return _differences(one.losses, other.losses)


def norm_differences(one: Curve, other: Curve) -> list[float]:
    """The difference of the gradient norms at each step, as a share of that of the first curve."""
    return _differences(one.norms, other.norms, relative=True)


def evaluation_difference(one: Curve, other: Curve) -> float | None:
    """The largest difference of the evaluations' losses; infinite if only the other lacks one, None if the first curve has none."""
    if not one.evaluations:
        return None
    return largest([abs(loss - other.evaluations.get(key, inf)) for key, loss in one.evaluations.items()])


def largest(differences: Sequence[float]) -> float:
    """The largest difference; one that is not finite counts as infinite."""
    return max((each if isfinite(each) else inf for each in differences), default=0.0)


def _number(value: float | None) -> float:
    return nan if value is None else value


def _differences(one: Sequence[float], other: Sequence[float], *, relative: bool = False) -> list[float]:
    """The difference of two curves at each step; infinite at a step that one of them lacks."""
    return [abs(a - b) / (abs(a) or 1.0 if relative else 1.0) for a, b in zip_longest(one, other, fillvalue=inf)]
