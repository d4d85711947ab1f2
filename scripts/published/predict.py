"""Predictions of published cases, from their configuration alone."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from ...trainer.plan.costs.cost_context import CostContext
from ...trainer.plan.costs.local_tensors import LocalTensors, block_split
from ...trainer.plan.error_bars import Planned, memory_bar, step_bar
from ...trainer.plan.layout.layout import Layout
from ...trainer.plan.layout_cost import LayoutCost, StepSeconds, layout_cost, stage_bytes
from ...trainer.plan.layout_of_run import layout_of_run
from ...trainer.plan.rules.rules import broken_rules
from ...trainer.spec.problem import Unreadable
from ...trainer.spec.run import Run
from .case_runs import RECOMPUTED_SHARE, Case, Inexpressible, WeightedRun, runs_of_case
from .frameworks import framework_of

HALF = 2  # bytes of a gradient as DeepSpeed sends it, however it is summed (engine.py: communication_data_type)
GATHERED = 2 + 4  # bytes a parameter: gathered in bf16, and its gradient in float32
LOSS = 2 + 4  # bytes a logit that the papers count: the logits, and their float32 softmax
COMPILED_LOSS = 2 + 2  # bytes a logit of a compiled loss: the logits, and their gradient
RESERVED = 1.15  # what torch's allocator takes from the device, cached pieces that fit no request included, over what tensors hold
WORKSPACES = 3 << 25  # bytes, of cuBLAS, cuBLASLt and Transformer Engine, 32 MiB each on Hopper


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
        runs = runs_of_case(case)
        first = runs[0].run
        if found := broken_rules(first, first.parallel, first.train.microbatch):
            return Prediction(id=case["id"], why_not="; ".join(each.says for each in found))
        return _predict_runs(case, runs)
    except (Inexpressible, Unreadable) as error:
        return Prediction(id=case["id"], why_not=str(error))


def _predict_runs(case: Case, runs: tuple[WeightedRun, ...]) -> Prediction:
    """Predict a legal case. Layers that differ add up by their shares."""
    costs = [_cost(case, each.run) for each in runs]
    shares = [each.share for each in runs]
    seconds = sum(share * cost.seconds for share, cost in zip(shares, costs, strict=True))
    memory = sum(share * cost.memory for share, cost in zip(shares, costs, strict=True))
    run = runs[0].run
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


def predicted_seconds(case: Case) -> float:
    """The seconds of a step alone, of a case that can be planned."""
    return sum(each.share * _timed_layout(case, each.run)[3].step for each in runs_of_case(case))


def _timed_layout(case: Case, run: Run) -> tuple[CostContext, Layout, LayoutCost, StepSeconds]:
    """Return how a case's framework lays a run out, and what that costs."""
    context = CostContext(run)
    layout = layout_of_run(context, run.parallel, run.train.microbatch)
    if not framework_of(case["framework"] or "").scatters:
        layout = layout._replace(gradient_sync=layout.gradient_sync._replace(scatters=False, gradient=HALF))
    cost = layout_cost(context, layout)
    if cost.seconds is None:
        raise Inexpressible(f"no rate of {run.cluster.device.name} is known in {run.train.precision}")
    return context, layout, cost, cost.seconds


def _cost(case: Case, run: Run) -> RunCost:
    context, layout, cost, seconds = _timed_layout(case, run)
    kind = case["measured"].get("peak_mem_kind") or ""
    totals = _stage_totals(case, context, layout, cost)
    fullest = totals.index(max(totals))
    of_first_rank = framework_of(case["framework"] or "").of_first_rank
    stage = layout.mesh.pp - 1 if "last rank" in kind else 0 if of_first_rank else fullest
    seen = _seen_bytes(case, totals[stage], context.device_context)
    return RunCost(seconds.step, seen, stage, _least_peak(case, context, layout, totals), context.capacity)


def _least_peak(case: Case, context: CostContext, layout: Layout, totals: list[int]) -> int:
    """Bytes of the fullest rank. Where a framework's recipes recompute or offload activations as memory asks, and a case does not say what
    its recipe did, the least that they can: those with full recomputation."""
    if case["recompute"] is not None or not framework_of(case["framework"] or "").relieves:
        return max(totals)
    least = layout._replace(parallel=replace(layout.parallel, recompute="full"))
    return min(max(totals), max(_stage_totals(case, context, least, layout_cost(context, least))))


def _seen_bytes(case: Case, total: int, device_context: int) -> int:
    """Bytes that a case's source sees of a rank that holds `total`, of which the device's context is a part.

    The peak of what is allocated counts tensors. Frameworks' own metrics, and nvidia-smi, see what the allocator took from the device;
    nvidia-smi sees the context too.
    """
    kind = case["measured"].get("peak_mem_kind") or ""
    allocated = total - device_context + WORKSPACES
    if "allocated" not in kind:
        allocated = round((1 + (RESERVED - 1) * framework_of(case["framework"] or "").fragments) * allocated)
    return allocated + (device_context if "nvidia-smi" in kind else 0)


def _stage_totals(case: Case, context: CostContext, layout: Layout, cost: LayoutCost) -> list[int]:
    """Bytes of a rank of each stage: the papers' count, as the case's framework changes it.

    Layers that recompute nothing may save what eager modules do; one that recomputes every second product keeps the others' results; a
    loss that is not compiled holds further copies of the logits. They are gone before the last layer's backward holds its gradients and,
    if it is recomputed, all that it saves. Recomputation of some of the layers makes the pointwise operators again, whoever computes them.
    """
    framework = framework_of(case["framework"] or "")
    papers, eager = layout, framework.saves == "torch" and not case["compile"]
    if eager and case["recompute"] not in RECOMPUTED_SHARE:
        layout = layout._replace(form="torch", fused=False)
        cost = layout_cost(context, layout)
    products = 0
    if case["recompute"] == "selective-op":
        form = "torch" if eager else layout.form
        full = replace(layout.parallel, recompute="full")
        layout = layout._replace(form=form, fused=layout.fused and not eager, parallel=full)
        cost = layout_cost(context, layout)
        products = _second_products(context, layout)
    loss, layer = _logit_bytes(case, layout.parallel.tp), cost.blocks.layer
    backward = layer.temporary - products  # of the last layer, which holds all that it recomputes
    beside, totals, counts = _bytes_beside(case, context.run), [], layout_cost(context, papers).kinds
    for stage, at in enumerate(layout.partition.kind_of_stage):
        held, counted = cost.kinds[at], counts[at].logits
        saved = held.passes.saved + layout.partition.kinds[at].layers * products
        total = stage_bytes(layout, held._replace(passes=held.passes._replace(saved=saved)), stage) - held.logits - layer.recomputed
        totals.append(total + beside * held.states.elements.parameters + max(counted * loss // LOSS, backward))
    return totals


def _second_products(context: CostContext, layout: Layout) -> int:
    """Bytes of a layer's activations that torchtitan's selective recomputation keeps beside the layer's input: the results of every
    second product with weights, from the first, and of fused attention (its activation_checkpoint.py)."""
    split = block_split(layout.parallel, layout.microbatch, layout.form, fused=layout.fused)
    multiple, width = context.run.model.vocab_multiple, context.widths.activation
    local = LocalTensors(context.table, split, vocab_multiple=multiple, activation=width, form=layout.form)
    results = [op.product.rows + outer for op in context.table.layer if op.product and op.weights for outer in op.product.outers]
    attention = [tensor for op in context.table.layer if op.name == "attention.out" or op.core for tensor in op.saves_megatron]
    return sum(width * local.count(dims) for dims in results[::2]) + sum(map(local.bytes, attention))


def _logit_bytes(case: Case, tp: int) -> int:
    """Bytes a logit at the loss. One over a vocabulary that the tensor axis splits is never compiled: torchtitan's loss_parallel."""
    framework = framework_of(case["framework"] or "")
    if tp > 1:
        return framework.split_loss
    since = framework.compiled_loss
    return COMPILED_LOSS if since and case["compile"] and _source_month(case) >= since else framework.loss


def _source_month(case: Case) -> int:
    """Year and month of a case's source, 202504, as its reference names them; one that names none is as new as any."""
    found = re.search(r"20[0-3]\d-?[01]\d(?!\d)", case["source"]["ref"])
    return int(found.group().replace("-", "")) if found else 999912


def _bytes_beside(case: Case, run: Run) -> int:
    """Bytes a parameter that a framework holds beside the papers' count.

    Under a pipeline torch's FSDP keeps its layers gathered, and their gradients in float32, from the first micro-batch to the last.
    """
    gathered = GATHERED if run.parallel.zero == 3 and run.parallel.pp > 1 else 0
    return gathered + (framework_of(case["framework"] or "").beside if case["precision"] == "bf16" else 0)
