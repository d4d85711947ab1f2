"""Predictions of published cases, from their configuration alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ...trainer.plan.costs.cost_context import CostContext
from ...trainer.plan.error_bars import Planned, memory_bar, step_bar
from ...trainer.plan.layout.layout import Layout
from ...trainer.plan.layout_cost import LayoutCost, layout_blocks, layout_cost, stage_bytes
from ...trainer.plan.rules.rules import broken_rules
from ...trainer.plan.run_layout import run_layout
from ...trainer.spec.problem import Unreadable
from ...trainer.spec.run import Run
from .express import RECOMPUTED_SHARE, Case, Inexpressible, Part, express
from .frameworks import framework_of

GATHERED = 2 + 4  # bytes a parameter: gathered in bf16, and its gradient in float32
LOSS = 2 + 4  # bytes a logit that the papers count: the logits, and their float32 softmax


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is predicted of one case. Seconds of a step; bytes of the rank and of the kind that the source measured."""

    id: str
    step_seconds: float | None = None
    step_low: float | None = None
    step_high: float | None = None
    memory_peak: int | None = None
    memory_low: int | None = None
    memory_high: int | None = None
    memory_stage: int | None = None
    fits: bool | None = None
    why_not: str | None = None

    def row(self) -> dict[str, object]:
        """The prediction as a JSON object."""
        return asdict(self)


def predict(case: Case) -> Prediction:
    """Predict a case; `why_not` says why one can't be planned."""
    try:
        parts = express(case)
        first = parts[0].run
        if found := broken_rules(first, first.parallel, first.train.microbatch):
            return Prediction(id=case["id"], why_not="; ".join(each.says for each in found))
        return _predict_parts(case, parts)
    except (Inexpressible, Unreadable) as error:
        return Prediction(id=case["id"], why_not=str(error))


def _predict_parts(case: Case, parts: tuple[Part, ...]) -> Prediction:
    """Predict a legal case. Layers that differ add up by their shares."""
    costs = [_cost(case, part.run) for part in parts]
    shares = [part.share for part in parts]
    seconds = sum(share * cost.seconds for share, cost in zip(shares, costs, strict=True))
    memory = sum(share * cost.memory for share, cost in zip(shares, costs, strict=True))
    run = parts[0].run
    planned = Planned(run, run.parallel, None, round(memory))
    step, held = step_bar(planned, seconds), memory_bar(planned)
    return Prediction(
        id=case["id"],
        step_seconds=seconds,
        step_low=step.low,
        step_high=step.high,
        memory_peak=round(memory),
        memory_low=round(held.low),
        memory_high=round(held.high),
        memory_stage=costs[0].stage,
        fits=sum(share * cost.peak for share, cost in zip(shares, costs, strict=True)) <= costs[0].capacity,
    )


class RunCost(NamedTuple):
    """Costs of a run: seconds of a step, bytes of the rank that the source measured, its stage, bytes of the fullest and of the device."""

    seconds: float
    memory: int
    stage: int
    peak: int
    capacity: int


def _cost(case: Case, run: Run) -> RunCost:
    context = CostContext(run)
    layout = run_layout(context, run.parallel, run.train.microbatch)
    cost = layout_cost(context, layout)
    if cost.seconds is None:
        raise Inexpressible(f"no rate of {run.cluster.device.name} is known in {run.train.precision}")
    kind = case["measured"].get("peak_mem_kind") or ""
    totals = _stage_totals(case, context, layout, cost)
    fullest = totals.index(max(totals))
    stage = layout.mesh.pp - 1 if "last rank" in kind else fullest
    seen = totals[stage] if "nvidia-smi" in kind else totals[stage] - context.device_context
    return RunCost(cost.seconds.step, seen, stage, totals[fullest], context.capacity)


def _stage_totals(case: Case, context: CostContext, layout: Layout, cost: LayoutCost) -> list[int]:
    """Bytes of a rank of each stage: the papers' count, as the case's framework changes it.

    Layers that recompute nothing may save what eager modules do; a recomputed layer holds all that it saves while its backward runs; a
    loss that is not compiled holds further copies of the logits. Recomputation of some of the operators makes the pointwise ones again,
    whoever computes them.
    """
    framework = framework_of(case["framework"] or "")
    papers = layout
    if framework.saves == "torch" and not case["compile"] and case["recompute"] not in RECOMPUTED_SHARE:
        layout = replace(layout, form="torch")
        cost = layout_cost(context, layout)
    again = 0
    if layout.parallel.recompute == "full":
        plain = replace(layout, parallel=replace(layout.parallel, recompute="none"))
        again = layout_blocks(context, plain).layer.saved - cost.blocks.layer.saved
    loss = LOSS if case["compile"] else framework.loss
    beside, totals = _bytes_beside(case, context.run), []
    for stage, at in enumerate(layout.partition.kind_of_stage):
        held, counted = cost.kinds[at], layout_cost(context, papers).kinds[at].logits
        total = stage_bytes(layout, held, stage) + beside * held.parameters
        totals.append(total - held.logits + counted * loss // LOSS + again)
    return totals


def _bytes_beside(case: Case, run: Run) -> int:
    """Bytes a parameter that a framework holds beside the papers' count.

    Under a pipeline torch's FSDP keeps its layers gathered, and their gradients in float32, from the first micro-batch to the last.
    """
    gathered = GATHERED if run.parallel.zero == 3 and run.parallel.pp > 1 else 0
    return gathered + (framework_of(case["framework"] or "").beside if case["precision"] == "bf16" else 0)
