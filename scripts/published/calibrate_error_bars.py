"""The error bars that measured runs ask for, beside those of trainer/plan/error_bars.py, and how many runs lie inside.

    python -m distrain.scripts.published.calibrate_error_bars CASES.json

A rule asks for the factors that hold nine in ten runs of its kind, each predicted by constants fitted without its source: of a step time
the same factor both ways, of memory one for each way, with one run in twenty beyond each. Memory has one fitted constant, `RESERVED`, which
is fitted again to the other sources. Where no run of a kind was measured, all runs are asked and each source counts the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...trainer.plan.error_bars import MEMORY_BARS, STEP_BARS, BarRule, Planned
from ..show_help import show_help
from . import predict as predict_module
from .case_runs import Case, runs_of_case
from .fit_constants import Constants, folds_of, held_out, log_ratios, slopes_of, sources_of
from .measured import peak_bytes, step_seconds
from .predict import predict

HELD = 0.9  # of the runs


class Calibration(NamedTuple):
    """Measured runs of one figure: log ratios of planned over measured as fitted, cross-validated and without their source.

    Memory has nothing to cross-validate: there `crossed` is as fitted.
    """

    planned: list[Planned]
    sources: list[str]
    fitted: Any
    crossed: Any
    without_source: Any


def of_steps(cases: Sequence[Case]) -> Calibration:
    """Step times."""
    cases = [case for case in cases if step_seconds(case)]
    constants = Constants()
    ratios = log_ratios(cases, constants, {})
    slopes, sources = slopes_of(cases, constants, ratios), sources_of(cases)
    crossed, without = held_out(ratios, slopes, folds_of(cases)), held_out(ratios, slopes, sources)
    return Calibration([bar_inputs(case) for case in cases], sources, ratios, crossed, without)


def of_memory(cases: Sequence[Case]) -> Calibration:
    """Peaks of memory."""
    cases = [case for case in cases if peak_bytes(case)]
    fitted, today = _memory_ratios(cases), predict_module.RESERVED
    predict_module.RESERVED = 1.0
    without_cached = _memory_ratios(cases)
    predict_module.RESERVED = today
    sources = sources_of(cases)
    without = without_reserved_of_source(without_cached, (fitted - without_cached) / log(today), sources)
    return Calibration([bar_inputs(case) for case in cases], sources, fitted, fitted, without)


def without_reserved_of_source(ratios: Any, slopes: Any, sources: Sequence[str]) -> Any:
    """Return each run's log ratio with the `RESERVED` that the other sources ask for: the change of its logarithm, from 0, that minimises
    the sum of their absolute errors. `ratios` are those without it, `slopes` their derivatives by its logarithm."""
    found, names = ratios.copy(), np.array(sources)
    for source in set(sources):
        others = (names != source) & (slopes > 0)
        changes = -ratios[others] / slopes[others]
        best = min(changes, key=lambda change: np.abs(ratios[others] + slopes[others] * change).sum(), default=0.0)
        found[names == source] += max(0.0, best) * slopes[names == source]
    return found


def _memory_ratios(cases: Sequence[Case]) -> Any:
    return np.array([log((predict(case).memory_peak or 0) / (peak_bytes(case) or 1)) for case in cases])


def bar_inputs(case: Case) -> Planned:
    """What a case's bars depend on."""
    run = runs_of_case(case)[0].run
    return Planned(run, run.parallel, None, predict(case).memory_peak or 0)


def of_rule(rule: BarRule, rules: Sequence[BarRule], data: Calibration) -> Any:
    """Which runs are evidence of a rule: those of its kind; of the first, those of no other; of a kind without runs, all."""
    if not rule.runs:
        return np.ones(len(data.planned), dtype=bool)
    if rule is rules[0]:
        return np.array([not any(other.holds(each) for other in rules[1:]) for each in data.planned])
    return np.array([rule.holds(each) for each in data.planned])


def quantile(values: Any, weights: Any, share: float) -> float:
    """The value below which lies a share of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / np.sum(weights)
    return float(values[order][min(len(values) - 1, int(np.searchsorted(reached, share)))])


def asked_factors(rule: BarRule, inside: Any, data: Calibration, *, both: bool) -> tuple[float, float]:
    """The factors (low, high) that a rule's runs ask for; with `both` ways the same."""
    ratios, sources = data.without_source[inside], np.array(data.sources)[inside]
    weights = np.array([1 / np.sum(sources == each) for each in sources]) if not rule.runs else np.ones(len(ratios))
    if both:
        factor = exp(quantile(np.abs(ratios), weights, HELD))
        return factor, factor
    beyond = (1 - HELD) / 2
    return exp(max(0.0, quantile(ratios, weights, 1 - beyond))), exp(max(0.0, -quantile(ratios, weights, beyond)))


def inside_bars(rules: Sequence[BarRule], data: Calibration, ratios: Any) -> Any:
    """Whether each measurement lies inside the bar around a prediction with this log ratio."""
    held = [[rule for rule in rules if rule.holds(each)] for each in data.planned]
    low = np.array([log(max(rule.low for rule in each)) for each in held])
    high = np.array([log(max(rule.high for rule in each)) for each in held])
    return (ratios <= low + 1e-9) & (ratios >= -high - 1e-9)


def with_asked_factors(rules: Sequence[BarRule], data: Calibration, keep: Any, *, both: bool) -> list[BarRule]:
    """The rules with the factors that some of the runs ask for; one without runs among them keeps its own."""
    kept = Calibration([each for each, is_kept in zip(data.planned, keep, strict=True) if is_kept],
                       [each for each, is_kept in zip(data.sources, keep, strict=True) if is_kept],
                       data.fitted[keep], data.crossed[keep], data.without_source[keep])  # fmt: skip
    found = []
    for rule in rules:
        inside = of_rule(rule, rules, kept)
        factors = asked_factors(rule, inside, kept, both=both) if inside.any() else (rule.low, rule.high)
        found.append(rule._replace(low=factors[0], high=factors[1]))
    return found


def inside_held_out_bars(rules: Sequence[BarRule], data: Calibration, *, both: bool) -> Any:
    """Whether each measurement lies inside bars whose widths, too, were chosen without its source."""
    found = np.zeros(len(data.planned), dtype=bool)
    sources = np.array(data.sources)
    for source in set(data.sources):
        out = sources == source
        found[out] = inside_bars(with_asked_factors(rules, data, ~out, both=both), data, data.without_source)[out]
    return found


def _print_figure(name: str, rules: Sequence[BarRule], data: Calibration, *, both: bool) -> None:
    print(
        f"{name + ': ' + str(len(data.planned)) + ' runs':66} {'runs':>5} {'sources':>7}   asked: low high    today: low high, runs sources"
    )
    for rule in rules:
        inside = of_rule(rule, rules, data)
        count, sources = int(inside.sum()), len(set(np.array(data.sources)[inside]))
        low, high = asked_factors(rule, inside, data, both=both) if count else (0.0, 0.0)
        today = f"{rule.low:12.2f} {rule.high:.2f} {rule.runs:5} {rule.sources:3}"
        print(f"  {rule.says:64} {count:5} {sources:7} {low:12.2f} {high:.2f} {today}")
    for words, held in (
        ("as fitted", inside_bars(rules, data, data.fitted)),
        ("5-fold cross-validation", inside_bars(rules, data, data.crossed)),
        ("leave one source out", inside_bars(rules, data, data.without_source)),
        ("leave one source out, widths too", inside_held_out_bars(rules, data, both=both)),
    ):
        print(f"  inside, {words:34} {held.mean():6.1%} of runs, {by_source(data, held):6.1%} where each source counts the same")


def by_source(data: Calibration, held: Any) -> float:
    """The mean over the sources of the share of their runs that lie inside."""
    sources = np.array(data.sources)
    return float(np.mean([held[sources == each].mean() for each in set(data.sources)]))


FIGURES: tuple[tuple[str, tuple[BarRule, ...], Callable[[Sequence[Case]], Calibration], bool], ...] = (
    ("step", STEP_BARS, of_steps, True),
    ("memory", MEMORY_BARS, of_memory, False),
)


def main() -> None:
    """Print, for step time and memory, what each rule asks for and what is inside."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    for name, rules, figures, both in FIGURES:
        _print_figure(name, rules, figures(cases), both=both)


if __name__ == "__main__":
    show_help(__doc__)
    main()
