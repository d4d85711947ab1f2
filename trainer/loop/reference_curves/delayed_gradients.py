"""The reference of pipelines without a flush and of sums that are used late: one process of plain torch that steps with gradients of
earlier weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...plan.mesh_position import mesh_position
from ...spec.derived.batch_levels import samples_before
from ...spec.run import Parallel, Run
from ...spec.sections.lr_schedule import learning_rate
from ..train import is_due
from .reference_run import (
    ReferenceCurve,
    compare_with_run,
    copy_weights,
    evaluation_losses,
    mean_loss,
    plain_optimizer,
    read_batches,
    set_rate,
    whole_model,
)


def delayed_curve(run: Run) -> ReferenceCurve:
    """Train a run of schedule pipedream or pipedream_2bw, or of parallel.staleness, in any layout, by delayed gradients in one process."""
    train, parallel, steps = run.train, run.parallel, run.train.steps or 0
    late = _updates_late(parallel)
    stages = _weights_of_stages(run)
    data, module = read_batches(run), whole_model(run)
    newest = dict(module.named_parameters())
    optimizers = [plain_optimizer(run, {name: newest[name] for name in names}) for names in stages]
    oldest = max(late(stage) for stage in range(len(stages)))
    history = deque([copy_weights(newest)], maxlen=oldest + 1)  # the weights after each update since the last flush
    losses, norms = [], []
    for step in range(steps):
        totals, squares = [], []
        begin, end = samples_before(train, step), samples_before(train, step + 1)
        sequences = end - begin if parallel.staleness else _sequences_of_update(run)
        for first in range(begin, end, sequences):
            met = dict[str, Tensor]()  # of each stage the weights `late` updates before, at most those of the flush
            for stage, names in enumerate(stages):
                version = history[-1 - min(late(stage), len(history) - 1)]
                met |= {name: version[name].requires_grad_() for name in names}
            loss = mean_loss(run, module, met, data.batch(first, sequences), step)
            gradients = dict(zip(met, torch.autograd.grad(loss, list(met.values())), strict=True))
            for names, optimizer in zip(stages, optimizers, strict=True):
                for name in names:
                    newest[name].grad = gradients[name]
                squares.append(float(nn.utils.clip_grad_norm_([newest[name] for name in names], train.clip or torch.inf)) ** 2)
                set_rate(optimizer, learning_rate(run.optim, step, steps))
                optimizer.step()
            history.append(copy_weights(newest))
            totals.append(loss.item())
        losses.append(sum(totals) / len(totals))
        norms.append((sum(squares) / len(totals)) ** 0.5)
        if is_due(train.evaluate.every, step + 1) or is_due(run.checkpoint.every, step + 1):
            history = deque([history[-1]], maxlen=oldest + 1)  # a flush: the next sequences meet the newest weights
    evaluations = evaluation_losses(run, module, newest)
    return ReferenceCurve(losses=losses, norms=norms, evaluations=evaluations, weights=newest)


def _updates_late(parallel: Parallel) -> Callable[[int], int]:
    """By how many updates a stage's weights are old when a gradient is computed (stages from 0): by parallel.staleness on all; pipedream's
    by those that the stages behind it have under way (arXiv:1806.03377), with vertical sync all like the first stage's; pipedream_2bw's by
    one (arXiv:2006.09503 section 3.1)."""
    if parallel.staleness:
        return lambda stage: parallel.staleness
    if parallel.schedule == "pipedream_2bw":
        return lambda stage: 1
    return lambda stage: parallel.pp - 1 - (0 if parallel.vertical else stage)


def _sequences_of_update(run: Run) -> int:
    """The sequences of an update of a pipeline without a flush: pipedream's are a micro-batch of each replica, the other's a step."""
    data = run.cluster.nodes * run.cluster.gpus // (run.parallel.tp * run.parallel.pp * run.parallel.cp)
    return run.train.batch if run.parallel.schedule == "pipedream_2bw" else data * run.train.microbatch


def _weights_of_stages(run: Run) -> list[list[str]]:
    """The names of the weights of each stage, which clips alone; where the pipeline flushes, all clip together, as one."""
    if run.parallel.staleness:
        return [[name for name, _ in whole_model(run).named_parameters()]]
    stages: dict[int, list[str]] = {}
    for rank in range(run.cluster.nodes * run.cluster.gpus):
        position = mesh_position(run, rank)
        held = [shard.name for part in position.parts for shard in position.weight_shards(run, part)]
        stages[position.coordinates["pp"]] = list(dict.fromkeys([*stages.get(position.coordinates["pp"], []), *held]))
    return [stages[stage] for stage in sorted(stages)]


def delayed_gradients(layout: str) -> dict[str, Any]:
    """Train the run of a run folder by delayed gradients: `compare_with_run`."""
    return compare_with_run(layout, delayed_curve)
