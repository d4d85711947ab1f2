"""The reference of compressed gradients: one process of plain torch that computes the gradient of each data-parallel rank, and sums them by
PowerSGD (arXiv:1905.13727 algorithm 1).

It shares the model, the data, the learning rate and the first right factors with the engine, and nothing of how that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.counter_rng import dropout_keys, normal_block
from ...layers.cross_entropy import IGNORED
from ...layers.transformer.multi_token_prediction import further_arguments
from ...models.build import named_constants
from ...models.moe.module import mixture_layers
from ...models.moe.routing_counts import RoutingCounts, step_biases, take_routing_counts
from ...plan.axes.powersgd_factors import compressed_stack
from ...plan.axes.weight_slices import WeightShard
from ...plan.mesh_position import mesh_position
from ...plan.native.buckets import compression_rank
from ...spec.derived.batch_levels import samples_before
from ...spec.run import Run
from ...spec.sections.lr_schedule import learning_rate
from ..data.samples.batches import Batch
from ..train import is_due
from .reference_run import ReferenceCurve, compare_with_run, evaluation_losses, plain_optimizer, read_batches, set_rate, whole_model


@dataclass(kw_only=True)
class SimulatedBlock:
    """A block of a logical weight that one rank holds, and that data-parallel ranks compress: one of the tensor axis's shards."""

    shard: WeightShard
    rank: int
    seed: int
    right: Tensor = field(init=False)  # [..., columns, rank]
    errors: list[Tensor] = field(default_factory=list)  # of each data-parallel rank

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin with the right factor that the seed, the weight's name and the block's place give, and share out the errors equally."""
        shape, offset, length = ((*sizes[:-2], *sizes[-1:]) for sizes in (self.shard.shape, self.shard.offset, self.shard.length))
        name = f"{self.shard.name} right factor"
        self.right = normal_block(self.seed, name, (*shape, self.rank), (*offset, 0), (*length, self.rank))
        self.errors = [torch.stack(self.errors).mean(0) for _ in self.errors]

    def of(self, weight: Tensor) -> Tensor:
        """The block of a logical weight, or of its gradient, as a view."""
        edges = zip(self.shard.offset, self.shard.length, strict=True)
        return weight[tuple(slice(first, first + many) for first, many in edges)]

    def sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum of the ranks' gradients of the block by a step of PowerSGD, and keep what it leaves out."""
        errors = self.errors or [torch.zeros_like(each) for each in gradients]
        wanted = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        left = torch.stack([each @ self.right for each in wanted]).sum(0)
        left = torch.linalg.qr(left).Q * (left.abs().amax((-2, -1), keepdim=True) > 0)  # an expert without tokens has no gradient
        right = torch.stack([each.mT @ left for each in wanted]).sum(0)
        self.right = torch.where(left.abs().amax((-2, -1), keepdim=True) > 0, right, self.right)
        made: Tensor = left @ right.mT
        self.errors = [each - made / len(gradients) for each in wanted]
        return made


def compressed_curve(run: Run) -> ReferenceCurve:
    """Train a run with compressed gradients, in any layout, in one process.

    Context-parallel ranks count as one: a sum of gradients that is compressed depends on the sum of what the ranks have alone.
    """
    train, steps = run.train, run.train.steps or 0
    ranks, blocks = mesh_position(run, 0).mesh.dp, simulated_blocks(run)
    data, module = read_batches(run), whole_model(run)
    weights = dict(module.named_parameters())
    optimizer = plain_optimizer(run, weights)
    losses, norms = [], []
    for step in range(steps):
        begin = samples_before(train, step)
        share = (samples_before(train, step + 1) - begin) // ranks
        batches = [data.batch(begin + rank * share, share) for rank in range(ranks)]
        count = sum(int((each.labels != IGNORED).sum()) for each in batches)
        parts, total = [], 0.0
        for batch in batches:
            loss = _loss_sum(run, module, batch, step) / count
            parts.append(dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)))
            total += loss.item()
        for name, weight in weights.items():
            weight.grad = torch.stack([each[name] for each in parts]).sum(0)
        for block in blocks if step >= run.parallel.compress.start else ():
            name = block.shard.name
            block.of(weights[name].grad).copy_(block.sum([block.of(each[name]) for each in parts]))  # type: ignore[arg-type]
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), train.clip or torch.inf)))
        set_rate(optimizer, learning_rate(run.optim, step, steps))
        optimizer.step()
        if run.model.router.steps_bias:
            counts = RoutingCounts(run.model, take_routing_counts([module], run.model, torch.device("cpu")))
            step_biases(mixture_layers(module), counts, run.model.router.bias_rate)
        losses.append(total)
        if is_due(run.checkpoint.every, step + 1):
            for block in blocks:
                block.restart()
    evaluations = evaluation_losses(run, module, weights)
    return ReferenceCurve(losses=losses, norms=norms, evaluations=evaluations, weights={**dict(named_constants(module)), **weights})


def simulated_blocks(run: Run) -> list[SimulatedBlock]:
    """Return every block of a weight that ranks of this run compress, once."""
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], SimulatedBlock] = {}
    for rank in range(run.cluster.nodes * run.cluster.gpus):
        position = mesh_position(run, rank)
        for shard in (shard for part in position.parts for shard in position.weight_shards(run, part)):
            columns = compression_rank(run.parallel, position.mesh, expert=shard.expert)
            if compressed_stack(shard.size, columns) and min(shard.length):
                block = SimulatedBlock(shard=shard, rank=columns, seed=run.train.seed)
                found.setdefault((shard.name, shard.offset, shard.length), block)
    return list(found.values())


def _loss_sum(run: Run, module: nn.Module, batch: Batch, step: int) -> Tensor:
    """Return the sum of the losses of a rank's batch."""
    keys = dropout_keys(run.train.seed, step, batch.samples, torch.arange(run.train.seq)) if run.model.dropout else None
    further = further_arguments(run.model, batch.tokens, batch.labels, batch.documents)
    total: Tensor = module(batch.tokens, batch.labels, documents=batch.documents, keys=keys, **further)[0]
    return total


def compressed_gradients(layout: str) -> dict[str, Any]:
    """Train the run of a run folder with compressed gradients in one process: `compare_with_run`."""
    return compare_with_run(layout, compressed_curve)
