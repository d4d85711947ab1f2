"""Proves layouts of a tiny recipe for a check: `prove`'s own comparison with one process, at its own tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...cli.config.load import load_recipe
from ...trainer.plan.plan import make_plan
from ...trainer.prove.judge import LayoutResult
from ...trainer.prove.run_trials import StartServer, run_proof
from ...trainer.prove.trials.layouts import ONE_PROCESS, ProveLayout, run_in_layout
from ...trainer.prove.trials.plan_proof import Proof, shortened_run
from ...trainer.prove.trials.trial import Trial
from .check_context import CheckContext
from .finding import Finding
from .fit_runs import RECIPE

STEPS = 4


def prove_layouts(
    context: CheckContext, name: str, words: Sequence[str], layouts: Sequence[ProveLayout], start_server: StartServer
) -> Finding:
    """Train a tiny recipe with overrides as one process and in each layout, in a folder of this name, and judge these as `prove` does."""

    def trial(layout: ProveLayout) -> Trial:
        overrides = (*context.words(layout.ranks), *words, f"log.dir={context.folder}")
        run = run_in_layout(shortened_run(load_recipe(RECIPE, overrides), STEPS, name), layout)
        return Trial(layout=layout, run=run, plan=make_plan(run))

    reference, trials = trial(ONE_PROCESS), tuple(map(trial, layouts))
    proof = Proof(
        recipe=reference.run, reference=reference, trials=trials, control=None, saver=None, resume=None, unchosen=0, skipped=()
    )  # fmt: skip
    result = run_proof(proof, lambda each: None, lambda text: None, start_server)
    rows = [result.reference, *result.layouts]
    return Finding(
        figures={
            "layouts": {each.trial.name: _figures(each) for each in result.layouts},
            "steps": STEPS,
            "tolerance": {"loss": result.tolerance.loss, "norm": result.tolerance.norm},
        },
        departures=tuple(f"{each.trial.name}: {each.reason or each.verdict}" for each in rows if each.verdict != "same"),
    )


def _figures(result: LayoutResult) -> dict[str, Any]:
    return {"verdict": result.verdict, "loss": result.loss, "norm": result.norm, "weights": result.weights}
