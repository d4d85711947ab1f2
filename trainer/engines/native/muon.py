"""Muon's step of the layers' matrices on engine `native` (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...parallel.process_groups import Grid
from ...plan.axes.weight_slices import WeightShard
from ...plan.mesh_position import mesh_position
from ...plan.native.optimizer_step import stepped_at_once
from ...spec.run import Run
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import MASTER_DTYPE, WeightBucket
from .matrix_exchange import MatrixBucket, MatrixExchange
from .newton_schulz import orthogonalise_update, rate_factor
from .rounded_moments import MOMENTUM, TAKEN, MomentRounding


class MuonStep:
    """Steps the matrices of a rank's buckets of matrices, and keeps their momenta in the states of the optimizer that steps the others.

    Momentum and step are of each element that this rank steps; between them the update of each whole matrix is made orthogonal, in float32
    where the run computes in it, else in bfloat16.
    """

    def __init__(
        self,
        run: Run,
        grid: Grid,
        buckets: Sequence[WeightBucket | ShardedWeight],
        optimizer: torch.optim.Optimizer,
        rounding: MomentRounding | None,
    ) -> None:
        self.lr = run.optim.lr
        self._optim, self._buckets = run.optim, buckets
        self._type = torch.float32 if run.train.precision == "fp32" else torch.bfloat16
        self._rounding, self._states = rounding, {each: optimizer.state[each.master] for each in buckets}
        if rounding:
            rounding.make_states(optimizer, buckets)
        else:
            for bucket, state in self._states.items():
                state[MOMENTUM] = torch.zeros_like(bucket.master.data)
        shards = _shards_of_tensor_ranks(run, grid)
        self._exchanges = []
        for expert in (False, True):
            some = [each for each in buckets if each.kind.expert == expert]
            if some:
                sharing, copies = some[0].sharing, some[0].copies
                self._exchanges.append((some, MatrixExchange(some, shards, sharing, copies, grid.group("tp"))))

    def step(self, divisor: Tensor) -> None:
        """Step with the gradients over `divisor`."""
        step = partial(orthogonalise_update, steps=self._optim.muon.ns_steps)
        for buckets, exchange in self._exchanges:
            updates = {each: self._update(each, divisor) for each in buckets}
            exchange.orthogonalise(updates, step, self._type)
            while updates:
                self._take_step(*updates.popitem())

    def _update(self, bucket: MatrixBucket, divisor: Tensor) -> Tensor:
        """Return the update of what this rank steps of a bucket, flat: its momentum, or Nesterov's. It takes the gradient's place where
        that has the type that is orthogonalised."""
        gradient, momentum, muon = bucket.shard_gradient, self._states[bucket][MOMENTUM], self._optim.muon
        scaled = gradient.to(MASTER_DTYPE).div_(divisor)
        if self._rounding:
            update = self._update_in_parts(self._rounding, bucket, scaled)
        else:
            momentum.lerp_(scaled, 1 - muon.momentum)
            update = scaled.lerp_(momentum, muon.momentum) if muon.nesterov else momentum
        return gradient.copy_(update) if gradient.dtype == self._type else update.to(self._type)

    def _update_in_parts(self, rounding: MomentRounding, bucket: MatrixBucket, scaled: Tensor) -> Tensor:
        """Step a bucket's momentum, which is kept in bfloat16 or in 8 bits, with `scaled` gradients [N], and return the update in their
        place."""
        state, muon = self._states[bucket], self._optim.muon
        for part in rounding.parts(bucket, state[TAKEN] + 1, stepped_at_once(scaled.device.type)):
            own = scaled[part.place]
            momentum = part.widen(state[MOMENTUM]).lerp_(own, 1 - muon.momentum)
            part.keep((state[MOMENTUM], momentum))
            if muon.nesterov:
                own.lerp_(momentum, muon.momentum)
            else:
                own.copy_(momentum)
        state[TAKEN] += 1
        return scaled

    def _take_step(self, bucket: MatrixBucket, update: Tensor) -> None:
        """Take a step of a bucket's float32 weights along orthogonal updates; weights decay first."""
        bucket.master.data.mul_(1 - self.lr * self._optim.weight_decay)
        for row, _, offset, length in bucket.pieces:
            rate = self.lr * rate_factor(*row.shard.matrix, self._optim.muon.adjust_lr_fn)
            bucket.master.data[offset : offset + length].add_(update[offset : offset + length], alpha=-rate)


def _shards_of_tensor_ranks(run: Run, grid: Grid) -> list[dict[str, WeightShard]]:
    """Return the weights' shards, in the table's order, on each tensor-parallel rank beside this one."""
    ranks = group.ranks if (group := grid.group("tp")) else (grid.world.rank,)
    positions = [mesh_position(run, rank) for rank in ranks]
    return [{shard.name: shard for part in each.parts for shard in each.weight_shards(run, part)} for each in positions]
