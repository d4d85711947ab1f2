"""PowerSGD (arXiv:1905.13727): a bucket's gradients travel as two factors of low rank, and what that loses is added to the next step's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....layers.counter_rng import normal_block
from ....layers.rank_group import Group
from ....plan.axes.powersgd_factors import MatrixStack, compressed_stack
from ....plan.axes.weight_slices import WeightShard

# E matrices, N rows, M columns, R rank; W data-parallel ranks

DEPENDENT = 32.0  # times the rounding of float32: a column that projection leaves no more of is a multiple of the others, and noise


class MatrixFactors(NamedTuple):
    """The matrices of one weight, its errors and their factors: views of a bucket's flat tensors."""

    shard: WeightShard
    start: int  # its first element in the bucket, and in the errors
    gradient: Tensor  # [E, N, M]
    error: Tensor  # [E, N, M]
    left: Tensor  # [E, N, R]
    right: Tensor  # [E, M, R]


class EqualFactors(NamedTuple):
    """The factors of all matrices of one shape."""

    left: Tensor  # [E, N, R]
    right: Tensor  # [E, M, R]


class BucketCompression:
    """The factors and the errors of a bucket all of whose weights are compressed.

    M is a rank's part of the global batch's gradient, e its error: M += e / W; P = sum of M Q, orthogonalised; Q = sum of M^T P; the
    gradient becomes P Q^T, and e = W M - P Q^T. So the mean of the errors over ranks is the sum of M less P Q^T. Training depends on
    that mean alone: each rank may have it instead of its own error.
    """

    def __init__(
        self, shards: Sequence[WeightShard], starts: Sequence[int], gradients: Tensor, rank: int, seed: int, copies: Group
    ) -> None:
        """`gradients` is the bucket's flat tensor, in which the gradient of each of `shards` begins at its start."""
        self.is_on = True
        self._gradients, self._seed, self._copies = gradients, seed, copies
        self.errors = torch.zeros_like(gradients)
        stacks = [(shard, start, _stack(shard, rank)) for shard, start in zip(shards, starts, strict=True)]
        self._left = gradients.new_zeros(sum(each.matrices * each.rows * rank for _, _, each in stacks))
        self._right = gradients.new_zeros(sum(each.matrices * each.columns * rank for _, _, each in stacks))
        self._equals: list[EqualFactors] = []
        self.weights: list[MatrixFactors] = []
        of_shape: dict[tuple[int, int], list[tuple[WeightShard, int, MatrixStack]]] = defaultdict(list)
        for shard, start, stack in stacks:
            of_shape[stack.rows, stack.columns].append((shard, start, stack))
        filled = [0, 0]
        for (rows, columns), some in of_shape.items():
            count = sum(stack.matrices for *_, stack in some)
            equals = EqualFactors(
                self._left[filled[0] : filled[0] + count * rows * rank].view(count, rows, rank),
                self._right[filled[1] : filled[1] + count * columns * rank].view(count, columns, rank),
            )
            filled = [filled[0] + equals.left.numel(), filled[1] + equals.right.numel()]
            self._equals.append(equals)
            first = 0
            for shard, start, stack in some:
                last = first + stack.matrices
                gradient, error = (flat[start : start + prod(stack)].view(stack) for flat in (gradients, self.errors))
                self.weights.append(MatrixFactors(shard, start, gradient, error, equals.left[first:last], equals.right[first:last]))
                first = last
        self.restart()

    def restart(self) -> None:
        """Draw the right factors from the seed and each weight's logical name and place, as at the start of a run."""
        for each in self.weights:
            shard, rank = each.shard, each.right.shape[-1]
            place = [(shard.shape[dim], shard.offset[dim], shard.size[dim]) for dim in (*range(len(shard.shape) - 2), -1)]
            shape, offset, size = ((*values, end) for values, end in zip(zip(*place, strict=True), (rank, 0, rank), strict=True))
            drawn = normal_block(self._seed, f"{shard.name} right factor", shape, offset, size, each.right.device)
            each.right.copy_(drawn.view_as(each.right))

    def forget(self) -> None:
        """Forget all errors and factors: those of a step whose numbers were not finite are not either."""
        self.errors.zero_()
        self.restart()

    def share_errors(self) -> None:
        """Give every rank the mean of all ranks' errors, which a checkpoint keeps, and draw the right factors again, as a run that resumes
        from it does. Every rank calls it."""
        self.errors.div_(self._copies.size)
        dist.all_reduce(self.errors, group=self._copies.handle)
        self.restart()

    def begin(self) -> Any:
        """Begin to sum the left factors of the gradients that have arrived; return the message under way."""
        self._gradients.add_(self.errors, alpha=1 / self._copies.size)
        for each in self.weights:
            torch.bmm(each.gradient, each.right, out=each.left)
        return dist.all_reduce(self._left, group=self._copies.handle, async_op=True)

    def go_on(self) -> Any:
        """Begin to sum the right factors that belong to the summed left ones; return the message under way.

        A column of the left factor that depends on the others is zero: that of the right one stays for the next step.
        """
        for equals in self._equals:
            equals.left.copy_(orthogonalise(equals.left))
            is_zero = equals.left.abs().amax(1, keepdim=True) == 0  # [E, 1, R]
            equals.right.mul_(is_zero / self._copies.size)
        for each in self.weights:
            each.right.baddbmm_(each.gradient.mT, each.left)
        return dist.all_reduce(self._right, group=self._copies.handle, async_op=True)

    def complete(self) -> None:
        """Make the gradients of the summed factors, and the errors."""
        for each in self.weights:
            torch.baddbmm(each.gradient, each.left, each.right.mT, beta=self._copies.size, alpha=-1, out=each.error)
            torch.bmm(each.left, each.right.mT, out=each.gradient)

    def held_tensors(self) -> Sequence[Tensor]:
        """Return all that compression holds."""
        return self.errors, self._left, self._right


def orthogonalise(columns: Tensor) -> Tensor:
    """Return orthonormal columns [E, N, R], float32, that span the same space: by Gram and Schmidt, each projection done twice, so that
    they are orthogonal to rounding. A column that depends on those before it becomes zero.

    Columns are scaled first: the squares of a small gradient's would underflow.
    """
    made = columns.float() / columns.float().abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    least = DEPENDENT * torch.finfo(torch.float32).eps
    for at in range(made.shape[-1]):
        column, before = made[:, :, at : at + 1], made[:, :, :at]
        length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        for _ in range(2 if at else 0):
            column -= before @ (before.mT @ column)
        rest = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        is_dependent = rest <= length * least
        column.div_(rest.masked_fill(is_dependent, 1.0)).masked_fill_(is_dependent, 0.0)
    return made


def _stack(shard: WeightShard, rank: int) -> MatrixStack:
    stack = compressed_stack(shard.size, rank)
    assert stack is not None, shard.name
    return stack
