"""The verdict on each layout: how far its curve and weights are from those of one process, and how far rounding alone may take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal

from .checks.compare_trial_messages import message_differences
from .checks.curve import Curve, evaluation_difference, first_step, largest, loss_differences, norm_differences
from .checks.executed_actions import action_difference
from .trials.trial import Trial

# Rounding alone, from sums in another order. In float32, 5e-6, 2e-4 and a thousandth were seen over 20 steps; in half precision
# 3e-4 and 2e-3, and a weight whose gradient is small against its rounding goes anywhere that Adam's steps can take it.
# At the first step weights are equal still, and a float32 norm is at most 2e-5 of itself from another layout's.
FLOAT32_SHARES = (
    1e-5,
    1e-3,
    5e-5,
    0.01,
)  # nats of a loss; shares of the gradient norm, of the first step's, of the learning rates added up
HALF_SHARES = (3e-3, 2e-2, 2e-2, inf)
# Moments in 8 bits are in other blocks on other ranks: losses 1e-4 and norms 6e-4 apart were seen. The first step has float32's norm.
INT8_SHARES = (1e-3, 5e-3, 5e-5, inf)
SLIGHT = 100.0  # times the tolerance: a smaller departure may be a recipe in which rounding grows, which a control run shows
CONTROL_FACTOR = 10.0  # a layout may be this many times as far from one process as the control run is

# rounding: it departs, and float64 shows that rounding alone does. messages, actions: it departs in them alone.
LayoutVerdict = Literal["same", "rounding", "departs", "messages", "actions", "failed", "hangs"]
AS_ONE_PROCESS: tuple[LayoutVerdict, ...] = ("same", "rounding")  # verdicts on layouts that train the curve of one process


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a layout may be from one process: nats of a loss, a share of the gradient norm and of the first step's, a weight's units."""

    loss: float
    norm: float
    first_norm: float
    weights: float

    def multiply(self, factor: float) -> Tolerance:
        """This tolerance times `factor`."""
        return Tolerance(
            loss=factor * self.loss, norm=factor * self.norm, first_norm=factor * self.first_norm, weights=factor * self.weights
        )


@dataclass(frozen=True, kw_only=True)
class FigureDeparture:
    """A figure of a layout that is out of tolerance: from which step on (from 1), by how much there, and what rounding explains."""

    noun: Literal["loss", "gradient norm"]
    step: int
    apart: float
    limit: float

    def __str__(self) -> str:
        return f"{self.noun} departs at step {self.step} by {self.apart:.1e}; rounding explains {self.limit:.1e}"


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """One trained layout: its verdict, and its largest differences from one process, None where they are not known."""

    trial: Trial
    verdict: LayoutVerdict
    reason: str = ""  # why the verdict is not "same"
    seconds: float = 0.0  # from its first step to its end
    curve: Curve | None = None
    held_to: Curve | None = None  # its own, which one process simulates; None: that of one process's training
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    furthest_weight: str = ""
    evaluation: float | None = None  # difference of the evaluation's loss
    not_compared: tuple[str, ...] = ()  # weights that are left out of the comparison
    messages: Mapping[str, Any] | None = None  # counted against planned; None: not counted
    samples: str = ""  # how its ranks' samples fail to make up each batch once, in words
    departure: str = ""  # where it first departs, in words
    in_float64: str = ""  # what float64 says of its departure, in words; "": it was not asked


@dataclass(frozen=True, kw_only=True)
class ProofResult:
    """The results of one process and of all layouts, and the tolerance that they were judged by."""

    reference: LayoutResult  # one process
    layouts: tuple[LayoutResult, ...]
    tolerance: Tolerance
    control: LayoutResult | None = None  # one process again, with its batch cut into other micro-batches
    resumed: LayoutResult | None = None  # a layout that resumed from another one's checkpoint
    no_evaluation: str = ""  # why nothing was evaluated

    @property
    def checks(self) -> tuple[LayoutResult, ...]:
        """What was trained beside the layouts, where it is judged."""
        return tuple(each for each in (self.control, self.resumed) if each and each.trial.check)

    @property
    def ok(self) -> bool:
        """Whether all train the same curve, with the planned messages."""
        return all(each.verdict in AS_ONE_PROCESS for each in (self.reference, *self.layouts, *self.checks))

    @property
    def is_widened(self) -> bool:
        """Whether rounding grows in this recipe, so that the control run has widened the tolerance."""
        return self.tolerance != tolerance(self.reference)

    @property
    def largest_loss_difference(self) -> float:
        """In nats a token, over all layouts that train the curve of one process."""
        return largest([each.loss or 0.0 for each in self.layouts if not each.trial.layout.has_other_curve])

    @property
    def weight_tolerance_share(self) -> float | None:
        """The tolerance of weights as a share of how far Adam can take one; None if either is unknown."""
        limit = learning_rate_sum(self.reference)
        return self.tolerance.weights / limit if limit and isfinite(self.tolerance.weights) else None

    @property
    def not_compared(self) -> list[str]:
        """The weights that are left out of the comparison of any layout."""
        return list(dict.fromkeys(name for each in self.layouts for name in each.not_compared))


def tolerance(reference: LayoutResult) -> Tolerance:
    """The differences that rounding can make in a run of this precision."""
    run = reference.trial.run
    shares = HALF_SHARES if run.train.precision != "fp32" else INT8_SHARES if run.optim.moments == "int8" else FLOAT32_SHARES
    loss, norm, first_norm, share = shares
    return Tolerance(loss=loss, norm=norm, first_norm=first_norm, weights=share * learning_rate_sum(reference))


def learning_rate_sum(reference: LayoutResult) -> float:
    """How far Adam can take a weight in a run: the learning rates of its steps added up."""
    return sum(reference.curve.rates) if reference.curve else 0.0


def widened_tolerance(tolerance: Tolerance, control: LayoutResult) -> Tolerance:
    """The tolerance in a recipe where rounding takes one process as far from itself as the control run shows, after the first step."""
    return replace(
        tolerance,
        loss=max(tolerance.loss, CONTROL_FACTOR * (control.loss or 0.0)),
        norm=max(tolerance.norm, CONTROL_FACTOR * (control.norm or 0.0)),
        weights=max(tolerance.weights, CONTROL_FACTOR * (control.weights or 0.0)),
    )


def with_differences(result: LayoutResult, reference: LayoutResult, weights: Mapping[str, Any]) -> LayoutResult:
    """The result with its largest differences from one process; `weights` is the answer of the fork server's weight_difference."""
    one = result.held_to or _curve(reference)
    return replace(
        result,
        loss=largest(loss_differences(one, _curve(result))),
        norm=largest(norm_differences(one, _curve(result))),
        weights=weights["weights"],
        furthest_weight=weights["weight"],
        evaluation=evaluation_difference(one, _curve(result)),
        not_compared=tuple(weights["left_out"]),
    )


def figure_departures(reference: LayoutResult, result: LayoutResult, tolerance: Tolerance) -> list[FigureDeparture]:
    """The loss and the gradient norm where a layout is out of tolerance, that which departs first first."""
    one, other = result.held_to or _curve(reference), _curve(result)
    found = []
    nouns: tuple[tuple[Literal["loss", "gradient norm"], list[float], float, float], ...] = (
        ("loss", loss_differences(one, other), tolerance.loss, tolerance.loss),
        ("gradient norm", norm_differences(one, other), tolerance.first_norm, tolerance.norm),
    )
    for noun, differences, at_first, later in nouns:
        limits = [at_first, *[later] * len(differences)]
        rows = zip(differences, limits, strict=False)
        step, limit = next(((step, limit) for step, (each, limit) in enumerate(rows, 1) if not each <= limit), (None, 0.0))
        if step is not None:
            found.append(FigureDeparture(noun=noun, step=step, apart=largest([differences[step - 1]]), limit=limit))
    return sorted(found, key=lambda each: each.step)


def departure_reason(reference: LayoutResult, result: LayoutResult, tolerance: Tolerance) -> str:
    """In which figures, from which step on and by how much, a layout is out of tolerance; "" if in none."""
    if found := figure_departures(reference, result, tolerance):
        first, *others = found
        also = [f"; the {each.noun} too" if each.step == first.step else f"; the {each.noun} from step {each.step}" for each in others]
        return f"{first}{''.join(also)}"
    if not (result.weights or 0.0) <= tolerance.weights:
        says = f"{result.furthest_weight} departs by {result.weights:.1e}; rounding explains {tolerance.weights:.1e}"
        return f"after the last step {says}"
    if not (result.evaluation or 0.0) <= tolerance.loss:
        return f"evaluation departs by {result.evaluation:.1e}, though training agrees; rounding explains {tolerance.loss:.1e}"
    return f"samples: {result.samples}" if result.samples else ""


def judge_beside_curve(result: LayoutResult) -> LayoutResult:
    """The result of a layout whose curve is as it must be, with its verdict where it ran other actions or sent other messages."""
    if says := action_difference(result.trial):
        return replace(result, verdict="actions", reason=says)
    if says := message_differences(result.messages):
        return replace(result, verdict="messages", reason=says)
    return result


def departure_step(reference: LayoutResult, result: LayoutResult, tolerance: Tolerance) -> int:
    """The first step, from 1, at which a layout's curve is out of tolerance; its last step if only weights are."""
    last = min(len(_curve(each).losses) for each in (reference, result))
    return min((each.step for each in figure_departures(reference, result, tolerance)), default=last)


def is_slight(result: LayoutResult, proof: ProofResult) -> bool:
    """Whether a layout departs by so little that rounding may explain it, if it grows: a control run shows whether it does."""
    if not departure_reason(proof.reference, result, proof.tolerance):
        return False
    return not departure_reason(proof.reference, result, proof.tolerance.multiply(SLIGHT))


def rounding_grows(control: LayoutResult, proof: ProofResult) -> bool:
    """Whether a control run that departs only shows that rounding grows: slightly, from a first step that agrees."""
    reference = _curve(proof.reference)
    first = replace(proof.reference, curve=first_step(reference)), replace(control, curve=first_step(_curve(control)), weights=None)
    early = departure_reason(*first, proof.tolerance.multiply(1 / CONTROL_FACTOR))
    return is_slight(control, proof) and not early


def _curve(result: LayoutResult) -> Curve:
    assert result.curve is not None
    return result.curve
