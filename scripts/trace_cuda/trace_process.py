"""A process that traces ranks: a job in JSON from standard input, an answer to standard output, line by line (processes.py)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .device_guard import load_device_guard

if TYPE_CHECKING:
    from ...trainer.plan.result import Plan
    from ...trainer.spec.run import Run


def main() -> None:
    """Answer until standard input ends."""
    load_device_guard()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        try:
            answer = trace_job(json.loads(line))
        except Exception as error:  # a rank that can't be traced is an answer too
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def trace_job(job: dict[str, Any]) -> dict[str, Any]:
    """Trace the ranks of a job and plan its run."""
    from ...cli.config.load import load_recipe
    from ...trainer.plan.plan import make_plan
    from ...trainer.spec.changed_run import with_changes
    from .rank_trace import trace_rank

    run = load_recipe(job["recipe"], job["words"])
    plans = {"plan": make_plan(run), "eager": make_plan(with_changes(run, [("cluster.device.kind", "cpu"), ("train.compile", False)]))}
    if plans["eager"].problems and plans["eager"].memory is None:
        raise ValueError(plans["eager"].problems[0].says)
    traced = [trace_rank(run, rank) for rank in job["ranks"] or end_ranks(run)]
    return {
        "ranks": [
            {"traced": asdict(each), "planned": {form: kept_bytes(plan, each.stage) for form, plan in plans.items()}} for each in traced
        ]
    }


def end_ranks(run: Run) -> list[int]:
    """The first rank of the first and of the last stage."""
    world = run.cluster.nodes * run.cluster.gpus
    return [0] if run.parallel.pp == 1 else [0, world - world // run.parallel.pp]


def kept_bytes(plan: Plan, stage: int) -> float:
    """The activations and logits that a plan counts for one micro-batch of a stage, whose logits it holds of one micro-batch at a time."""
    assert plan.memory is not None
    row = plan.memory.stages[stage]
    return row.bytes.activations / row.in_flight + row.bytes.logits


if __name__ == "__main__":
    main()
