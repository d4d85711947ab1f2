"""The verdict on each layout: how far its curve and weights are from those of one process, and how far rounding alone may take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf, isfinite
from typing import Any, Literal

from .fork_client import JobResult
from .plan_proof import Trial

# Rounding alone, from sums in another order. In float32, 5e-6, 2e-4 and a thousandth were seen over 20 steps; in half precision
# 3e-4 and 2e-3, and a weight whose gradient is small against its rounding goes anywhere that Adam's steps can take it.
FLOAT32_SHARES = (1e-5, 1e-3, 0.01)  # nats of a loss, a share of the gradient norm, a share of the learning rates added up
HALF_SHARES = (3e-3, 2e-2, inf)
SLIGHT = 100.0  # times the tolerance: a smaller departure may be a recipe in which rounding grows, which a control run shows
CONTROL_FACTOR = 10.0  # a layout may be this many times as far from one process as the control run is

LayoutVerdict = Literal["same", "departs", "failed", "hangs"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a layout may be from one process: nats of a loss, a share of a gradient norm, a weight's own units."""

    loss: float
    norm: float
    weights: float

    def multiply(self, factor: float) -> Tolerance:
        """This tolerance times `factor`."""
        return Tolerance(loss=factor * self.loss, norm=factor * self.norm, weights=factor * self.weights)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss (nats a token), gradient norm and learning rate of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """One trained layout: its verdict, and its largest differences from one process, None where they are not known."""

    trial: Trial
    verdict: LayoutVerdict
    reason: str = ""  # why the verdict is not "same"
    seconds: float = 0.0  # from its first step to its end
    curve: Curve | None = None
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    furthest_weight: str = ""
    not_compared: tuple[str, ...] = ()  # weights that are left out of the comparison
    messages: Mapping[str, Any] | None = None  # counted against planned; None: not counted
    departure: str = ""  # where it first departs, in words


@dataclass(frozen=True, kw_only=True)
class ProofResult:
    """The results of one process and of all layouts, and the tolerance that they were judged by."""

    reference: LayoutResult  # one process
    layouts: tuple[LayoutResult, ...]
    tolerance: Tolerance
    control: LayoutResult | None = None  # one process again, with its batch cut into other micro-batches

    @property
    def ok(self) -> bool:
        """Whether all train the same curve."""
        return all(each.verdict == "same" for each in (self.reference, *self.layouts))

    @property
    def largest_loss_difference(self) -> float:
        """In nats a token, over all layouts."""
        return _largest([each.loss or 0.0 for each in self.layouts])

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
    loss, norm, share = FLOAT32_SHARES if reference.trial.run.train.precision == "fp32" else HALF_SHARES
    return Tolerance(loss=loss, norm=norm, weights=share * learning_rate_sum(reference))


def learning_rate_sum(reference: LayoutResult) -> float:
    """How far Adam can take a weight in a run: the learning rates of its steps added up."""
    return sum(reference.curve.rates) if reference.curve else 0.0


def widened_tolerance(tolerance: Tolerance, control: LayoutResult) -> Tolerance:
    """The tolerance in a recipe where rounding takes one process as far from itself as the control run shows."""
    return Tolerance(
        loss=max(tolerance.loss, CONTROL_FACTOR * (control.loss or 0.0)),
        norm=max(tolerance.norm, CONTROL_FACTOR * (control.norm or 0.0)),
        weights=max(tolerance.weights, CONTROL_FACTOR * (control.weights or 0.0)),
    )


def with_differences(result: LayoutResult, reference: LayoutResult, weights: Mapping[str, Any]) -> LayoutResult:
    """The result with its largest differences from one process; `weights` is the answer of the fork server's weight_difference."""
    return replace(
        result,
        loss=_largest(_loss_differences(reference, result)),
        norm=_largest(_norm_differences(reference, result)),
        weights=weights["weights"],
        furthest_weight=weights["weight"],
        not_compared=tuple(weights["left_out"]),
    )


def departure_reason(reference: LayoutResult, result: LayoutResult, tolerance: Tolerance) -> str:
    """In which figure, and by how much, a layout is out of tolerance; "" if in none."""
    for noun, differences, limit in (
        ("loss", _loss_differences(reference, result), tolerance.loss),
        ("gradient norm", _norm_differences(reference, result), tolerance.norm),
    ):
        step = next((step for step, each in enumerate(differences, 1) if not each <= limit), None)
        if step is not None:
            return f"{noun} departs at step {step} by {_largest(differences[:step]):.1e}; rounding explains {limit:.1e}"
    if not (result.weights or 0.0) <= tolerance.weights:
        return f"{result.furthest_weight} departs by {result.weights:.1e}; rounding explains {tolerance.weights:.1e}"
    return ""


def departure_step(reference: LayoutResult, result: LayoutResult, tolerance: Tolerance) -> int:
    """The first step, from 1, at which a layout's curve is out of tolerance; its last step if only weights are."""
    pairs = zip(_loss_differences(reference, result), _norm_differences(reference, result), strict=True)
    steps = (step for step, (loss, norm) in enumerate(pairs, 1) if not (loss <= tolerance.loss and norm <= tolerance.norm))
    return next(steps, min(len(_curve(each).losses) for each in (reference, result)))


def is_slight(result: LayoutResult, proof: ProofResult) -> bool:
    """Whether a layout departs by so little that a control run is worth its time; a proof has one control run at most."""
    if proof.control or not departure_reason(proof.reference, result, proof.tolerance):
        return False
    return not departure_reason(proof.reference, result, proof.tolerance.multiply(SLIGHT))


def exit_verdict(job: JobResult, limit: float | None) -> tuple[LayoutVerdict, str]:
    """The verdict on how a layout's ranks ended, and the reason; `limit` is the seconds that they had."""
    if job.timed_out:
        return "hangs", f"it was killed as hung after {limit:.0f} s: {rank_positions(job.steps)}"
    return ("failed", job.says or f"its ranks ended with {job.codes}") if any(job.codes) else ("same", "")


def rank_positions(steps: Sequence[int | None]) -> str:
    """The step of each rank in words: `ranks 0, 1 in step 3; rank 2 before the first step`."""
    ranks_at: dict[int | None, list[int]] = {}
    for rank, step in enumerate(steps):
        ranks_at.setdefault(step, []).append(rank)
    return "; ".join(_positions(ranks_at))


def _positions(ranks_at: Mapping[int | None, Sequence[int]]) -> Iterator[str]:
    for step, ranks in ranks_at.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        yield f"{who} {'before the first step' if step is None else f'in step {step + 1}'}"


def _loss_differences(reference: LayoutResult, result: LayoutResult) -> list[float]:
    return _differences(_curve(reference).losses, _curve(result).losses)


def _norm_differences(reference: LayoutResult, result: LayoutResult) -> list[float]:
    return _differences(_curve(reference).norms, _curve(result).norms, relative=True)


def _curve(result: LayoutResult) -> Curve:
    assert result.curve is not None
    return result.curve


def _differences(one: Sequence[float], other: Sequence[float], *, relative: bool = False) -> list[float]:
    """The difference of two curves at each step; infinite at a step that one of them lacks."""
    return [abs(a - b) / (abs(a) or 1.0 if relative else 1.0) for a, b in zip_longest(one, other, fillvalue=inf)]


def _largest(differences: Sequence[float]) -> float:
    """The largest difference; one that is not finite counts as infinite."""
    return max((each if isfinite(each) else inf for each in differences), default=0.0)
