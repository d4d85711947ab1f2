"""How unevenly the tokens of a step met the ranks of experts, and what a plan says that the busiest holds then."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...engines.engine import StepResult
from ...plan.plan import make_plan
from ...spec.changed_run import with_changes
from ...spec.run import Run
from ..state.training_setup import TrainingSetup


def expert_rank_loads(run: Run, setup: TrainingSetup, result: StepResult | None) -> dict[str, Any] | None:
    """Return on rank 0 what is written of a step's load of the ranks of experts, where ranks share them out; all ranks call this together.

    - "load": copies of the busiest rank of the planned fullest stage, in all of its layers, over an even share.
    - "activations": bytes that a plan for that load (parallel.ep_load) counts on that stage, logits included.
    """
    memory, grid = setup.plan.memory, setup.grid
    if run.parallel.ep == 1 or memory is None or result is None or result.routing is None:
        return None
    layers = tuple(setup.engine.expert_layers)
    load = result.routing.rank_loads(layers)[grid.coordinate("ep")] if layers else 0.0
    every: list[tuple[int, float]] = [(0, 0.0)] * setup.world.size
    dist.all_gather_object(every, (grid.coordinate("pp"), load), group=setup.host)
    most = min(max(load for stage, load in every if stage == memory.stage), run.model.most_ep_load)
    if most < 1 or not setup.world.is_rank0:  # 0: that stage has no experts
        return None
    planned = make_plan(with_changes(run, [("parallel.ep_load", most)])).memory
    assert planned is not None
    held = planned.stages[memory.stage].bytes
    return {"load": round(most, 4), "activations": held.activations + held.logits}
