"""Fit the constants of step times to published runs, and print the errors as fitted, cross-validated and by leave-one-source-out.

    python -m distrain.scripts.published.fit_constants CASES.json

Each constant is today's times a factor, whose logarithm has a prior. The sum of absolute errors is minimised around today's constants on
linearised predictions (a Gauss-Newton step, reweighted). A held-out case is predicted by the fit to the others, with priors that know
nothing of it: wide, and centred on the mean of the devices, on the mean of their generations, and on the same rate for all frameworks.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from ...trainer.plan.axes import dp
from ...trainer.plan.costs import cost_context, op_seconds, pass_seconds, roofline
from ...trainer.spec.run import Cluster
from ..show_help import show_help
from . import case_runs, frameworks
from .measured import step_seconds
from .predict import predicted_seconds

PRIOR, NARROW_PRIOR = 0.3, 0.08  # deviations of a factor's logarithm: of a constant, of a framework's rate
HELD_OUT_PRIOR = 0.7  # of a constant where a case is held out: it may be what only that case has told
DELTA = 0.05  # of a logarithm, for derivatives
FOLDS = 5
DEVICES = ("A100", "H100-80G", "H100-96G", "H200", "B200", "GB200", "B300", "GB300")
GENERATIONS = ("A", "H", "B")
MODULES: dict[str, tuple[Any, str]] = {
    "cast": (roofline, "CAST_BYTES"),
    "depth": (roofline, "TILE_DEPTH"),
    "grouped": (op_seconds, "GROUPED"),
    "head_dim": (op_seconds, "HEAD_DIM_EXPONENT"),
    "overlap": (pass_seconds, "OVERLAP_LOSS"),
    "waits": (pass_seconds, "HOST_WAITS"),
    "contention": (dp, "CONTENTION"),
    "tail": (cost_context, "SLOWEST_RANK"),
    "step": (cost_context, "STEP_DISPATCHES"),
}
RATES = tuple(row.name for row in frameworks.FRAMEWORKS if row.kernels != 1.0)
OF_GENERATION = tuple(f"{key} {letter}" for key in ("flash", "streaming", "dispatch", "inside") for letter in GENERATIONS)
NAMES = (*(f"sustained {name}" for name in DEVICES), *OF_GENERATION, "between", "launch", *MODULES, *(f"kernels {name}" for name in RATES))

Factors = Mapping[str, float]  # logarithms of factors; of a constant that is not named 0


class Constants:
    """Today's constants, and a way to scale them."""

    def __init__(self) -> None:
        self.modules = {name: getattr(*where) for name, where in MODULES.items()}
        self.frameworks = frameworks.FRAMEWORKS
        self.cluster: Callable[[case_runs.Case], Cluster] = case_runs.cluster_of

    def scale(self, factors: Factors) -> None:
        """Set every constant to today's times its factor."""

        def times(value: float, name: str) -> float:
            return value * exp(factors.get(name, 0.0))

        def scaled_cluster(stated: case_runs.Case) -> Cluster:
            cluster = self.cluster(stated)
            device, inside, between = cluster.device, cluster.inside, cluster.between
            assert inside
            assert between
            letter, name = _letter(device.name), _row_of(device.name)
            fields: dict[str, Any] = {key: times(getattr(device, key), f"{key} {letter}") for key in ("flash", "streaming", "dispatch")}
            fields["sustained"] = times(device.product_share, f"sustained {name}")
            fields["launch"] = times(device.launch, "launch")
            return replace(
                cluster,
                device=replace(device, **fields),
                inside=replace(inside, efficiency=min(1.0, times(inside.efficiency, f"inside {letter}"))),
                between=replace(between, efficiency=min(1.0, times(between.efficiency, "between"))),
            )

        for name, (module, attribute) in MODULES.items():
            setattr(module, attribute, times(self.modules[name], name))
        frameworks.FRAMEWORKS = tuple(row._replace(kernels=times(row.kernels, f"kernels {row.name}")) for row in self.frameworks)
        case_runs.cluster_of = scaled_cluster
        roofline.tile_efficiency.cache_clear()

    def are_read(self, name: str, case: case_runs.Case) -> bool:
        """Whether a plan of a case reads a constant of NAMES: one of all cases, or one of its device, of that's generation or of its
        framework."""
        device = self.cluster(case["cluster"]).device.name
        what, _, which = name.partition(" ")
        match what:
            case "sustained":
                return _row_of(device) == which
            case "kernels":
                return frameworks.framework_of(case["framework"] or "").name == which
            case _:
                return not which or _letter(device) == which


def log_ratios(cases: Sequence[case_runs.Case], constants: Constants, factors: Factors) -> Any:
    """Return the logarithm of planned over measured step seconds of each case."""
    constants.scale(factors)
    return np.array([log(predicted_seconds(case) / (step_seconds(case) or 1.0)) for case in cases])


def slopes_of(cases: Sequence[case_runs.Case], constants: Constants, ratios: Any) -> Any:
    """Return the derivatives of the log ratios by the logarithms of the constants, a column each; the constants are today's again.

    A case is planned again only with constants that its plan reads: the derivatives by those of other devices and frameworks are 0.
    """
    slopes = np.zeros((len(cases), len(NAMES)))
    for column, name in enumerate(NAMES):
        rows = [at for at, case in enumerate(cases) if constants.are_read(name, case)]
        slopes[rows, column] = (log_ratios([cases[at] for at in rows], constants, {name: DELTA}) - ratios[rows]) / DELTA
    constants.scale({})
    return slopes


def fitted_step(ratios: Any, slopes: Any, rows: Any, priors: Any, centres: Any) -> Any:
    """Return the change of the constants that minimises the absolute errors of some rows (iteratively reweighted least squares)."""
    change = centres.copy()
    for _ in range(30):
        left = ratios[rows] + slopes[rows] @ change
        weights = 6.0 / np.maximum(np.abs(left), 0.02)
        normal = slopes[rows].T @ (slopes[rows] * weights[:, None]) + np.diag(priors**-2)
        change = np.linalg.solve(normal, centres * priors**-2 - slopes[rows].T @ (weights * ratios[rows]))
    return change


def held_out(ratios: Any, slopes: Any, groups: Sequence[object]) -> Any:
    """Return each case's log ratio under the fit to all cases of other groups, by priors that know nothing of them."""
    found, numbers = ratios.copy(), np.arange(len(ratios))
    priors, centres = priors_of(HELD_OUT_PRIOR), ignorant_centres()
    for group in sorted(set(groups), key=str):
        inside = np.array([each == group for each in groups])
        found[inside] += slopes[inside] @ fitted_step(ratios, slopes, numbers[~inside], priors, centres)
    return found


def priors_of(prior: float) -> Any:
    """Return the prior deviation of each constant's factor."""
    return np.array([NARROW_PRIOR if name.startswith("kernels ") else prior for name in NAMES])


@cache
def ignorant_centres() -> Any:
    """Return the factors' logarithms that one would expect of a device, a generation or a framework that was not measured."""
    devices = {
        name: case_runs.named_cluster(*row).device for (_, _), row in case_runs.CLUSTERS.items() for name in [_device_of(row)] if name
    }
    letters = {letter: next(each for name, each in devices.items() if _letter(name) == letter) for letter in GENERATIONS}
    inside = {"A": "dgx_a100", "H": "dgx_h100", "B": "dgx_b200"}
    known = {f"sustained {name}": each.product_share for name, each in devices.items()}
    for letter, device in letters.items():
        known |= {f"{key} {letter}": getattr(device, key) for key in ("flash", "streaming", "dispatch")}
        link = case_runs.named_cluster(inside[letter], None).inside
        known[f"inside {letter}"] = link.efficiency if link else 1.0
    rates = {f"kernels {row.name}": row.kernels for row in frameworks.FRAMEWORKS}
    centres = []
    for name in NAMES:
        alike = [log(value) for key, value in known.items() if key.partition(" ")[0] == name.partition(" ")[0]]
        centres.append(fmean(alike) - log(known[name]) if name in known else -log(rates.get(name, 1.0)))
    return np.array(centres)


def _device_of(row: tuple[str, str | None]) -> str:
    return _row_of(case_runs.named_cluster(*row).device.name)


def _row_of(device: str) -> str:
    """Which of DEVICES a device is; "" for none."""
    return next((name for name in DEVICES if device.startswith(name)), "")


def _letter(device: str) -> str:
    """The generation of a device: GB200 and B200 are one, V100 counts as A100."""
    return "B" if device[0] == "G" else "A" if device[0] == "V" else device[0]


def main() -> None:
    """Fit, and print the factors and the errors."""
    cases = [case for case in json.loads(Path(sys.argv[1]).read_text()) if step_seconds(case)]
    constants = Constants()
    ratios = log_ratios(cases, constants, {})
    slopes = slopes_of(cases, constants, ratios)
    change = fitted_step(ratios, slopes, np.arange(len(cases)), priors_of(PRIOR), np.zeros(len(NAMES)))
    for name, each in zip(NAMES, change, strict=True):
        print(f"{name:28} x {exp(each):.3f}")
    _print_errors("today's constants", ratios)
    _print_errors("fitted again", ratios + slopes @ change)
    _print_errors(f"{FOLDS}-fold cross-validation", held_out(ratios, slopes, folds_of(cases)))
    _print_errors("leave one source out", held_out(ratios, slopes, sources_of(cases)))


def folds_of(cases: Sequence[case_runs.Case]) -> list[int]:
    """Return the number of each case's fold of a cross-validation."""
    folds = [at % FOLDS for at in range(len(cases))]
    random.Random(0).shuffle(folds)
    return folds


def sources_of(cases: Sequence[case_runs.Case]) -> list[str]:
    """Return the name of each case's source."""
    return [case["source"]["name"] for case in cases]


def _print_errors(name: str, ratios: Any) -> None:
    errors = sorted(abs(exp(each) - 1) for each in ratios)
    print(f"{name:28} median {median(errors):.1%}, mean {sum(errors) / len(errors):.1%}, p90 {errors[int(0.9 * len(errors))]:.1%}")


if __name__ == "__main__":
    show_help(__doc__)
    main()
