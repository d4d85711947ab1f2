"""Proves layouts of two ranks that share one GPU: `prove`'s own comparison with one process, at its own tolerance."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....cli.config.load import load_recipe
from ....trainer.plan.plan import make_plan
from ....trainer.prove.fork_client import ForkServer
from ....trainer.prove.judge import LayoutResult
from ....trainer.prove.prover import run_proof
from ....trainer.prove.trials.layouts import ONE_PROCESS, ProveLayout, run_in_layout
from ....trainer.prove.trials.plan_proof import Proof, shortened_run
from ....trainer.prove.trials.trial import Trial
from ..check_context import CheckContext
from ..finding import Finding
from .staged_messages import STAGED

SERVER = (sys.executable, "-m", "distrain.scripts.gpu.two_ranks.staged_ranks")
STEPS = 4
LAYOUTS = (
    ProveLayout(tp=2),
    ProveLayout(tp=2, sequence=True),
    ProveLayout(cp=2),
    ProveLayout(dp=2, zero=1),
    ProveLayout(dp=2, zero=3),
    ProveLayout(pp=2),
)
HALF_PRECISION_LAYOUTS = (
    ProveLayout(cp=2),
    ProveLayout(cp=2, all_to_all=True),
    ProveLayout(tp=2, sequence=True),
)  # attention across ranks calls another kernel than in float32
WORDS = ("model=tiny_llama", "data=synthetic", "train.seq=64", "train.batch=8", "train.microbatch=2")


def prove_two_ranks(context: CheckContext, precision: str = "fp32") -> Finding:
    """Train one process and two ranks in each layout, in float32 or bf16; figures are the largest differences by layout."""

    def trial(layout: ProveLayout) -> Trial:
        overrides = (*context.words(layout.ranks), *WORDS, f"train.precision={precision}", f"log.dir={context.folder}")
        run = run_in_layout(shortened_run(load_recipe("tiny_2x2x2", overrides), STEPS, "two_ranks"), layout)
        return Trial(layout=layout, run=run, plan=make_plan(run))

    layouts = LAYOUTS if precision == "fp32" else HALF_PRECISION_LAYOUTS
    trials = tuple(trial(each) for each in (layouts if context.on_gpu else layouts[:1] + layouts[4:5]))
    reference = trial(ONE_PROCESS)
    proof = Proof(
        recipe=reference.run, reference=reference, trials=trials, control=None, saver=None, resume=None, unchosen=0, skipped=()
    )  # fmt: skip
    result = run_proof(proof, lambda each: None, lambda text: None, _start_server)
    rows = [result.reference, *result.layouts]
    return Finding(
        figures={
            "layouts": {each.trial.name: _figures(each) for each in result.layouts},
            "steps": STEPS,
            "tolerance": {"loss": result.tolerance.loss, "norm": result.tolerance.norm},
            "staged through host memory": list(STAGED),
        },
        departures=tuple(f"{each.trial.name}: {each.reason or each.verdict}" for each in rows if each.verdict != "same"),
    )


def _start_server(log: Path, environment: Mapping[str, str]) -> ForkServer:
    return ForkServer(log, environment, command=SERVER)


def _figures(result: LayoutResult) -> dict[str, Any]:
    return {"verdict": result.verdict, "loss": result.loss, "norm": result.norm, "weights": result.weights}
