"""A process that traces ranks: a job in JSON from standard input, an answer to standard output, line by line (processes.py)."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from ...cli.config.load import load_recipe
from ...trainer.plan.costs.cost_context import CostContext
from ...trainer.plan.layout_cost import in_flight, layout_cost
from ...trainer.plan.layout_of_run import layout_of_run
from ...trainer.plan.plan import make_plan
from ...trainer.spec.changed_run import with_changes
from ...trainer.spec.derived.compiled_layers import has_compiled_layers
from ...trainer.spec.run import Run
from ...trainer.system.garbage_collection import RARE, keep_imports
from .device_guard import load_device_guard
from .host_rows import traced_host_rows
from .host_step import traced_host_step


def main() -> None:
    """Answer until standard input ends."""
    with keep_imports():
        load_device_guard()
        importlib.import_module(".rank_trace", __package__)
    gc.set_threshold(*RARE)
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
    run = load_recipe(job["recipe"], job["words"])
    match job["what"]:
        case "host_step":
            return traced_host_step(run)
        case "host_rows":
            return traced_host_rows(run)
    planned = make_plan(run)
    if planned.memory is None:
        raise ValueError(planned.problems[0].says)
    return {"ranks": [traced_and_planned(run, rank) for rank in job["ranks"] or end_ranks(run)]}


def traced_and_planned(run: Run, rank: int) -> dict[str, Any]:
    """Trace a rank, without compiled layers and, where the run compiles all of a layer, what it keeps with them; plan the same."""
    from .rank_trace import trace_compiled_bytes, trace_rank

    plain = with_changes(run, [("train.compile", False)])
    traced = trace_rank(plain, rank)
    planned = planned_bytes(plain, traced.stage, traced.gradients)
    if not has_compiled_layers(run.train, run.parallel) or run.parallel.ep > 1:  # between ranks of experts graphs break
        return {"traced": asdict(traced), "planned": asdict(planned)}
    kept = planned_bytes(run, traced.stage, traced.gradients).kept
    return {
        "traced": asdict(replace(traced, kept_compiled=trace_compiled_bytes(run, rank))),
        "planned": asdict(replace(planned, kept_compiled=kept)),
    }


@dataclass(frozen=True, kw_only=True)
class PlannedBytes:
    """What a plan counts for a rank of a stage: bytes that one micro-batch keeps for backward, and the most that a step's passes hold
    beside weights and the optimizer.

    Gradients of an earlier micro-batch are those of the trace: what DeepSpeed makes of them is its own.
    """

    kept: int
    peak: int
    kept_compiled: int | None = None


def planned_bytes(run: Run, stage: int, gradients: int) -> PlannedBytes:
    """Plan what a rank of a stage keeps and holds, if a micro-batch leaves so many bytes of gradients."""
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    costs = layout_cost(context, layout)
    cost = costs.kinds[layout.partition.kind_of_stage[stage]]
    once = cost.saved_last + cost.logits
    earlier = gradients if layout.micros > 1 else 0
    passed_on = 0 if stage == layout.mesh.pp - 1 else costs.blocks.stream  # the stage's result, until its gradient arrives
    held = ceil((cost.passes.saved + passed_on) * in_flight(layout, stage))
    return PlannedBytes(kept=once + cost.passes.saved, peak=once + held + cost.temporary + earlier)


def end_ranks(run: Run) -> list[int]:
    """The first rank of the first and of the last stage."""
    world = run.cluster.nodes * run.cluster.gpus
    return [0] if run.parallel.pp == 1 else [0, world - world // run.parallel.pp]


if __name__ == "__main__":
    main()
