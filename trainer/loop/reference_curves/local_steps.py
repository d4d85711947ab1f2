"""The reference of workers that step alone: one process of plain torch that trains each worker in turn, and averages them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...plan.layout.layout import mesh_of
from ...plan.layout.workers import worker_count
from ...spec.derived.batch_levels import samples_before
from ...spec.run import Run
from ...spec.sections.lr_schedule import learning_rate
from ..data.samples.batches import Batch
from ..train import is_due, is_save_due
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


class _Worker:
    """One worker's weights and optimizer."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        self.weights = {name: nn.Parameter(each.detach().clone()) for name, each in module.named_parameters()}
        self.optimizer = plain_optimizer(run, self.weights)


def local_steps_curve(run: Run) -> ReferenceCurve:
    """Train a run of parallel.sync.every > 1, in any layout, in one process."""
    train, steps, sync = run.train, run.train.steps or 0, run.parallel.sync
    mesh = mesh_of(run.parallel, run.cluster.nodes * run.cluster.gpus)
    data, module = read_batches(run), whole_model(run)
    workers = [_Worker(run, module) for _ in range(worker_count(run.parallel, mesh, run.cluster.gpus))]
    agreed = [nn.Parameter(each.detach().clone()) for each in module.parameters()]
    outer = torch.optim.SGD(agreed, lr=sync.outer.lr, momentum=sync.outer.momentum, nesterov=sync.outer.nesterov)
    losses, norms = [], []
    for step in range(steps):
        begin, end = samples_before(train, step), samples_before(train, step + 1)
        share = (end - begin) // len(workers)
        pieces = (data.batch(first, share) for first in range(begin, end, share))
        rows = [_step_alone(run, module, worker, piece, step) for worker, piece in zip(workers, pieces, strict=True)]
        losses.append(sum(loss for loss, _ in rows) / len(rows))
        norms.append((sum(norm**2 for _, norm in rows) / len(rows)) ** 0.5)
        done = step + 1
        if len(workers) > 1 and (is_due(sync.every, done) or is_save_due(run, done, steps) or done == steps):
            _step_together(workers, agreed, outer)
        if is_save_due(run, done, steps):
            _average_states(run, workers)
    evaluations = evaluation_losses(run, module, workers[0].weights)
    return ReferenceCurve(losses=losses, norms=norms, evaluations=evaluations, weights=copy_weights(workers[0].weights))


def _step_alone(run: Run, module: nn.Module, worker: _Worker, batch: Batch, step: int) -> tuple[float, float]:
    """Step one worker with its piece of a global batch. Return its mean loss and gradient norm."""
    loss = mean_loss(run, module, worker.weights, batch, step)
    worker.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(worker.weights.values(), run.train.clip or torch.inf))
    set_rate(worker.optimizer, learning_rate(run.optim, step, run.train.steps or 0))
    worker.optimizer.step()
    return loss.item(), norm


@torch.no_grad()
def _step_together(workers: Sequence[_Worker], agreed: Sequence[nn.Parameter], outer: torch.optim.Optimizer) -> None:
    """Step with the mean of what the workers took off the weights, and give all of them the result."""
    for at, weight in enumerate(agreed):
        copies = [list(each.weights.values())[at] for each in workers]
        weight.grad = weight - _mean(copies)
    outer.step()
    for worker in workers:
        for own, weight in zip(worker.weights.values(), agreed, strict=True):
            own.copy_(weight)


@torch.no_grad()
def _average_states(run: Run, workers: Sequence[_Worker]) -> None:
    """Give all workers the mean of their optimizers' states, as a checkpoint keeps it."""
    for names in zip(*(each.weights.values() for each in workers), strict=True):
        states = [each.optimizer.state[weight] for each, weight in zip(workers, names, strict=True)]
        for kind, first in states[0].items():
            if isinstance(first, Tensor) and first.dim():
                mean = _mean([state[kind] for state in states])
                if run.optim.moments == "bf16":
                    mean = mean.to(torch.bfloat16)
                for state in states:
                    state[kind].copy_(mean)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.detach() for each in tensors]).mean(0)


def local_steps(layout: str) -> dict[str, Any]:
    """Train the run of a run folder by workers that step alone: `compare_with_run`."""
    return compare_with_run(layout, local_steps_curve)
