"""Confirms departures in float64: a layout that is equal to one process there departs in float32 by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from math import inf, isnan
from pathlib import Path

from ..spec.run import Run
from .fork_client import ServerGone
from .judge import LayoutResult, ProofResult, figure_departures, judge_beside_curve, learning_rate_sum
from .trials.layouts import ProveLayout
from .trials.plan_proof import Proof
from .trials.trial import Trial

# In float64: nats of a loss; shares of a norm and of the learning rates added up. An error is about as large as in float32, and rounding
# 5e8 times as small: where float32 is further than 0.01 from one process, it may be this share of that.
WIDE_LIMIT, WIDE_SHARE = 1e-9, 1e-7
WIDE_FOLDER = "float64"  # in the folder of a proof

ERROR, ROUNDING, UNCONFIRMED = "error", "rounding", "not confirmed"


def may_be_rounding(result: LayoutResult, proof: ProofResult) -> bool:
    """Whether float64 can tell if a layout departs by rounding: on a CPU, where all that it computes and reads is in float32, and its first
    step agrees, as rounding needs steps to grow. Weights that a run begins with are read in their own type."""
    run = result.trial.run
    is_layout = result.verdict == "departs" and not result.trial.check and not result.samples
    if not is_layout or run.cluster.device.kind != "cpu" or narrow_words(run) or run.model.weights:
        return False
    return all(figure.step > 1 for figure in figure_departures(proof.reference, result, proof.tolerance))


def narrow_words(run: Run) -> list[str]:
    """The words of a run by which it computes or keeps something in a narrower type than float32."""
    values = {"train.precision": run.train.precision, "train.gradients": run.train.gradients, "optim.moments": run.optim.moments}
    return [f"{key}={value}" for key, value in values.items() if value not in ("fp32", "auto")]


def confirm_departures(proof: Proof, result: ProofResult, run_wide: Callable[[Proof], ProofResult]) -> ProofResult:
    """The results of a proof, where each layout that may depart by rounding has what float64 says of it; `run_wide` trains a proof there.
    One that agrees has the verdict `rounding`, unless its actions or messages are others than planned."""
    departed = {each.trial.layout for each in result.layouts if may_be_rounding(each, result)}
    try:
        wide = run_wide(wide_proof(proof, departed))
    except ServerGone as error:
        says = dict.fromkeys(departed, f"{UNCONFIRMED}: {error}")
    else:
        narrow = {each.trial.layout: each for each in result.layouts}
        says = {each.trial.layout: wide_verdict(each, narrow[each.trial.layout], wide.reference) for each in wide.layouts}
        why = f": {wide.reference.reason}" if wide.reference.reason else ""
        says = {**dict.fromkeys(departed, f"{UNCONFIRMED}: one process did not train in float64{why}"), **says}

    def confirmed(each: LayoutResult) -> LayoutResult:
        if each.trial.layout not in departed:
            return each
        each = replace(each, in_float64=says[each.trial.layout])
        return judge_beside_curve(replace(each, verdict="rounding")) if each.in_float64.startswith(ROUNDING) else each

    return replace(result, layouts=tuple(map(confirmed, result.layouts)))


def wide_proof(proof: Proof, departed: Container[ProveLayout]) -> Proof:
    """The proof of the layouts that depart, without checks and with run folders of its own."""

    def apart(trial: Trial) -> Trial:
        log = replace(trial.run.log, dir=str(Path(trial.run.log.dir) / WIDE_FOLDER))
        return replace(trial, run=replace(trial.run, log=log))

    trials = tuple(apart(each) for each in proof.trials if each.layout in departed)
    return replace(proof, reference=apart(proof.reference), trials=trials, control=None, saver=None, resume=None)


def wide_verdict(result: LayoutResult, narrow: LayoutResult, reference: LayoutResult) -> str:
    """What float64 says of a departure, whose result in float32 is `narrow`: error, or rounding, with the difference that says so."""
    if result.verdict in ("failed", "hangs") or result.curve is None:
        return f"{UNCONFIRMED}: float64 {result.verdict}: {result.reason}"
    if result.samples:
        return f"{ERROR}: {result.samples}"
    steps = learning_rate_sum(reference) or 1.0
    limits = {name: max(WIDE_LIMIT, WIDE_SHARE * min(figure, 1.0)) for name, figure in _figures(narrow, steps).items()}
    figures = _figures(result, steps)
    name = max(figures, key=lambda each: figures[each] / limits[each])
    is_rounding = figures[name] <= limits[name]
    return f"{ROUNDING if is_rounding else ERROR}: in float64 {name} is {figures[name]:.1e} from one process"


def _figures(result: LayoutResult, steps: float) -> dict[str, float]:
    """The differences of a result from one process, by their names; `steps`: the learning rates added up."""
    figures = {"loss": result.loss, "norm": result.norm, "evaluation": result.evaluation, "weights": (result.weights or 0.0) / steps}
    return {name: inf if isnan(figure or 0.0) else figure or 0.0 for name, figure in figures.items()}
