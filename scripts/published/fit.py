"""Fit the constants of step times to published runs, and print the errors as fitted, cross-validated and by leave-one-source-out.

    python -m distrain.scripts.published.fit CASES.json

Each constant is today's times a factor, whose logarithm has a prior around 0. The sum of absolute errors is minimised around today's
constants on linearised predictions (a Gauss-Newton step, reweighted); a held-out case is predicted by the fit to the others.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...trainer.plan.axes import dp
from ...trainer.plan.costs import block_costs, cost_context, op_seconds, roofline
from ...trainer.spec.run import Cluster
from . import express, frameworks
from .measured import step_seconds
from .predict import predict

PRIOR, NARROW_PRIOR = 0.3, 0.08  # deviations of a factor's logarithm: of a constant, of a framework's rate
DELTA = 0.05  # of a logarithm, for derivatives
FOLDS = 5
DEVICES = ("A100", "H100-80G", "H100-96G", "H200", "B200", "GB200", "B300", "GB300")
GENERATIONS = ("A", "H", "B")
MODULES: dict[str, tuple[Any, str]] = {
    "cast": (roofline, "CAST_BYTES"),
    "depth": (roofline, "DEPTH"),
    "grouped": (op_seconds, "GROUPED"),
    "head_dim": (op_seconds, "HEAD_DIM"),
    "overlap": (block_costs, "OVERLAP_LOSS"),
    "contention": (dp, "CONTENTION"),
    "tail": (cost_context, "TAIL"),
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
        self.cluster: Callable[[express.Case], Cluster] = express.cluster_of

    def scale(self, factors: Factors) -> None:
        """Set every constant to today's times its factor."""

        def times(value: float, name: str) -> float:
            return value * exp(factors.get(name, 0.0))

        def scaled_cluster(stated: express.Case) -> Cluster:
            cluster = self.cluster(stated)
            device, inside, between = cluster.device, cluster.inside, cluster.between
            assert inside
            assert between
            letter = "B" if device.name[0] == "G" else "A" if device.name[0] == "V" else device.name[0]
            name = next((each for each in DEVICES if device.name.startswith(each)), "")
            fields: dict[str, Any] = {key: times(getattr(device, key), f"{key} {letter}") for key in ("flash", "streaming", "dispatch")}
            fields["sustained"] = times(device.sustained, f"sustained {name}")
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
        express.cluster_of = scaled_cluster
        roofline.tile_efficiency.cache_clear()


def log_ratios(cases: Sequence[express.Case], constants: Constants, factors: Factors) -> Any:
    """Return the logarithm of planned over measured step seconds of each case."""
    constants.scale(factors)
    return np.array([log((predict(case).step_seconds or 0.0) / (step_seconds(case) or 1.0)) for case in cases])


def fitted_step(ratios: Any, slopes: Any, rows: Any, priors: Any) -> Any:
    """Return the change of the constants that minimises the absolute errors of some rows (iteratively reweighted least squares)."""
    change = np.zeros(slopes.shape[1])
    for _ in range(30):
        left = ratios[rows] + slopes[rows] @ change
        weights = 6.0 / np.maximum(np.abs(left), 0.02)
        normal = slopes[rows].T @ (slopes[rows] * weights[:, None]) + np.diag(priors**-2)
        change = np.linalg.solve(normal, -slopes[rows].T @ (weights * ratios[rows]))
    return change


def held_out(ratios: Any, slopes: Any, groups: Sequence[object], priors: Any) -> Any:
    """Return each case's log ratio under the fit to all cases of other groups."""
    found, numbers = ratios.copy(), np.arange(len(ratios))
    for group in set(groups):
        inside = np.array([each == group for each in groups])
        found[inside] += slopes[inside] @ fitted_step(ratios, slopes, numbers[~inside], priors)
    return found


def main() -> None:
    """Fit, and print the factors and the errors."""
    cases = [case for case in json.loads(Path(sys.argv[1]).read_text()) if step_seconds(case)]
    constants = Constants()
    ratios = log_ratios(cases, constants, {})
    slopes = np.stack([(log_ratios(cases, constants, {name: DELTA}) - ratios) / DELTA for name in NAMES], axis=1)
    priors = np.array([NARROW_PRIOR if name.startswith("kernels ") else PRIOR for name in NAMES])
    change = fitted_step(ratios, slopes, np.arange(len(cases)), priors)
    for name, each in zip(NAMES, change, strict=True):
        print(f"{name:28} x {exp(each):.3f}")
    folds = [at % FOLDS for at in range(len(cases))]
    random.Random(0).shuffle(folds)
    sources = [case["source"]["name"] for case in cases]
    _print_errors("today's constants", ratios)
    _print_errors("fitted again", ratios + slopes @ change)
    _print_errors(f"{FOLDS}-fold cross-validation", held_out(ratios, slopes, folds, priors))
    _print_errors("leave one source out", held_out(ratios, slopes, sources, priors))


def _print_errors(name: str, ratios: Any) -> None:
    errors = sorted(abs(exp(each) - 1) for each in ratios)
    print(f"{name:28} median {median(errors):.1%}, mean {sum(errors) / len(errors):.1%}, p90 {errors[int(0.9 * len(errors))]:.1%}")


if __name__ == "__main__":
    main()
