"""Buckets of weights: flat weights, their gradients and this rank's shard of them, and their messages on the data axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...layers.group import Group
from ...plan.native.buckets import Bucket
from ..rank_parameter import RankParameter

MASTER = torch.float32


class Piece(NamedTuple):
    """The elements of a parameter that are in a rank's shard of a bucket: where they begin in the parameter and in the shard."""

    row: RankParameter
    start: int
    offset: int
    length: int


class WeightBucket:
    """One bucket on this rank. Its parameters are views of one flat tensor.

    At ZeRO 0 the shard is the whole bucket. Gradients are summed in `gradients`, which at ZeRO 2 is there only while a micro-batch's
    backward fills it, except for those of a late bucket.
    """

    def __init__(self, bucket: Bucket, rows: Mapping[str, RankParameter], group: Group | None, zero: int, gradient: torch.dtype) -> None:
        self.bucket, self.kind, self.group = bucket, bucket.kind, group
        self.zero = zero if group else 0
        self.often = self.zero == 2 and not bucket.kind.late  # it travels at every micro-batch
        self.rows = [rows[name] for name in bucket.names]
        first = self.rows[0].parameter
        self.weights = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
        self._gradient_type = gradient
        self._starts: dict[nn.Parameter, int] = {}
        for row, start in zip(self.rows, bucket.starts, strict=True):
            view = self.weights[start : start + row.parameter.numel()].view(row.parameter.shape)
            view.copy_(row.parameter.data)
            row.parameter.data = view
            self._starts[row.parameter] = start
        ranks, rank = (group.size, group.rank) if group and self.zero else (1, 0)
        self.shard = bucket.shard(ranks, rank)
        own = self.weights[self.shard.start : self.shard.stop]
        self.master = nn.Parameter(own if own.dtype == MASTER else own.to(MASTER), requires_grad=False)
        self.gradients: Tensor | None = None if self.often else self._empty_gradients()
        self._summed: Tensor | None = None  # at ZeRO 2: this rank's shard of the sum over micro-batches
        self._filled: set[nn.Parameter] = set()  # parameters whose gradient has arrived since the bucket was empty
        self._work: Any = None
        self._scattered: Tensor | None = None
        self._sent: Tensor | None = None

    @property
    def pieces(self) -> Iterator[Piece]:
        """The elements of each parameter that this rank steps."""
        for row in self.rows:
            start = self._starts[row.parameter]
            first, last = max(start, self.shard.start), min(start + row.parameter.numel(), self.shard.stop)
            if first < last:
                yield Piece(row, first - start, first - self.shard.start, last - first)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add the gradient of a parameter."""
        if self.gradients is None:
            self.gradients = self._empty_gradients()
        start = self._starts[parameter]
        held = self.gradients[start : start + parameter.numel()].view(parameter.shape)
        if parameter in self._filled:
            held.add_(gradient)
        else:
            held.copy_(gradient)
            self._filled.add(parameter)

    def empty(self) -> None:
        """Forget the gradients of the step before."""
        self._filled.clear()
        self._summed = None

    def reduce(self) -> None:
        """Begin to sum the gradients that have arrived over the data axis."""
        if self.gradients is None:
            self.gradients = self._empty_gradients()
        for row in self.rows:
            if row.parameter not in self._filled:  # no loss depends on it
                start = self._starts[row.parameter]
                self.gradients[start : start + row.parameter.numel()].zero_()
        if self.group is None:
            return
        self.wait()
        if self.zero == 0:
            self._work = dist.all_reduce(self.gradients, group=self.group.handle, async_op=True)
            return
        self._scattered = self.gradients.new_empty(len(self.shard))
        self._work = dist.reduce_scatter_tensor(self._scattered, self.gradients, group=self.group.handle, async_op=True)
        if self.often:
            self._sent, self.gradients = self.gradients, None
            self._filled.clear()

    def wait(self) -> None:
        """Wait for a sum under way."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._scattered is None:
            return
        if self.often and self._summed is not None:
            self._summed += self._scattered
        else:
            self._summed = self._scattered
        self._scattered = self._sent = None

    def own_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's gradient of a parameter of a late bucket, flat, which other axes sum before the data axis does."""
        assert self.gradients is not None
        start = self._starts[parameter]
        held = self.gradients[start : start + parameter.numel()]
        if parameter not in self._filled:
            held.zero_()
            self._filled.add(parameter)
        return held

    @property
    def is_unsummed(self) -> bool:
        """Whether no sum of this step's gradients has begun."""
        return self._summed is None and self._work is None

    @property
    def shard_gradient(self) -> Tensor:
        """This rank's shard of the global batch's gradients, once they are summed."""
        if self._summed is not None:
            return self._summed
        assert self.gradients is not None
        return self.gradients

    def copy_master(self) -> None:
        """Give the stepped float32 weights to the flat tensor that forward uses, as wide as that is."""
        own = self.weights[self.shard.start : self.shard.stop]
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master.data)

    def gather(self) -> Any:
        """Begin to gather the other ranks' stepped weights; return the message under way, or None where this rank has all."""
        if self.group is None or self.zero == 0:
            return None
        own = self.weights[self.shard.start : self.shard.stop]
        return dist.all_gather_into_tensor(self.weights, own, group=self.group.handle, async_op=True)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of all that the bucket holds."""
        yield "weights", self.weights
        yield "optimizer", self.master.data
        for each in (self.gradients, self._summed):
            if each is not None:
                yield "gradients", each

    def _empty_gradients(self) -> Tensor:
        return torch.empty(self.bucket.elements, dtype=self._gradient_type, device=self.weights.device)


class BucketReducer:
    """Takes each weight's gradients of a step, and sums each bucket over the data axis as soon as it is complete.

    `uses` is how often a weight gets a gradient in a micro-batch. A bucket is complete after the last micro-batch, or after each one if
    it travels often. Late buckets wait until other axes have summed them.
    """

    def __init__(self, buckets: Sequence[WeightBucket], uses: Mapping[nn.Parameter, int], *, overlap: bool) -> None:
        self._early = [each for each in buckets if not each.kind.late]
        self._late = [each for each in buckets if each.kind.late]
        self._uses, self._overlap = uses, overlap
        self._bucket_of = {row.parameter: bucket for bucket in buckets for row in bucket.rows}
        self._left: dict[nn.Parameter, int] = {}  # gradients of each weight that its bucket still waits for
        self._next = 0
        self._under_way: WeightBucket | None = None

    def begin(self, micros: int) -> None:
        """Begin a step of so many micro-batches."""
        self._wanted = {weight: self._uses[weight] * (1 if bucket.often else micros) for weight, bucket in self._bucket_of.items()}
        self._left = dict(self._wanted)
        self._next, self._under_way = 0, None
        for bucket in (*self._early, *self._late):
            bucket.empty()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a parameter."""
        bucket = self._bucket_of[parameter]
        bucket.add(parameter, gradient)
        self._left[parameter] -= 1
        if self._left[parameter] > 0 or not self._is_complete(bucket):
            return
        if bucket.often:
            self._reduce_round(bucket)
        elif self._overlap:
            while self._next < len(self._early) and self._is_complete(self._early[self._next]):
                self._reduce_next()

    def before_backward(self, chunk: int) -> None:
        """Do nothing: weights are always whole."""

    def finish_backward(self) -> None:
        """Send all early buckets that have not travelled, in their order."""
        while self._next < len(self._early):
            self._reduce_next()

    def finish(self) -> None:
        """Send the late buckets, and wait until every bucket is summed."""
        for bucket in self._late:
            bucket.reduce()
        for bucket in (*self._early, *self._late):
            bucket.wait()

    def _is_complete(self, bucket: WeightBucket) -> bool:
        return all(self._left[row.parameter] <= 0 for row in bucket.rows)

    def _reduce_next(self) -> None:
        bucket = self._early[self._next]
        self._next += 1
        if not bucket.often:
            bucket.reduce()
        elif bucket.is_unsummed or any(self._left[row.parameter] < self._wanted[row.parameter] for row in bucket.rows):
            self._reduce_round(bucket)

    def _reduce_round(self, bucket: WeightBucket) -> None:
        for row in bucket.rows:
            self._left[row.parameter] += self._wanted[row.parameter]
        if self._under_way is not None:
            self._under_way.wait()  # and free its gradients: two buckets are held at most
        bucket.reduce()
        self._under_way = bucket
