"""When each bucket of gradients is summed over the data axis: as soon as it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .weight_buckets import WeightBucket


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
        self._open: dict[WeightBucket, int] = {}  # weights of each bucket that it waits for
        self._next = 0
        self._under_way: WeightBucket | None = None

    def begin(self, micros: int) -> None:
        """Begin a step of so many micro-batches."""
        self._wanted = {weight: self._uses[weight] * (1 if bucket.often else micros) for weight, bucket in self._bucket_of.items()}
        self._left = dict(self._wanted)
        self._open = {bucket: len(bucket.rows) for bucket in (*self._early, *self._late)}
        self._next, self._under_way = 0, None
        for bucket in (*self._early, *self._late):
            bucket.empty()

    def take_gradient(self, parameter: nn.Parameter) -> None:
        """Take the gradient that autograd has just given a parameter; none where its product was deferred."""
        if parameter.grad is None:
            return
        bucket = self._bucket_of[parameter]
        if not bucket.in_place:
            bucket.add(parameter, parameter.grad)
            parameter.grad = None
        self._count(parameter, bucket)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a parameter whose product was deferred."""
        bucket = self._bucket_of[parameter]
        bucket.add(parameter, gradient)
        self._count(parameter, bucket)

    def needs_hooks(self, bucket: WeightBucket) -> bool:
        """Whether a hook must pass each gradient of a bucket's weights to `take_gradient`."""
        return not bucket.in_place or (self._overlap and bool(bucket.sharing or bucket.copies or bucket.servers) and not bucket.kind.late)

    def _count(self, parameter: nn.Parameter, bucket: WeightBucket) -> None:
        self._left[parameter] -= 1
        if self._left[parameter]:
            return
        self._open[bucket] -= 1
        if self._open[bucket]:
            return
        if bucket.often:
            self._reduce_round(bucket)
        elif self._overlap:
            while self._next < len(self._early) and not self._open[self._early[self._next]]:
                self._reduce_next()

    def before_backward(self, chunk: int) -> None:
        """Do nothing: weights are always whole."""

    def finish_backward(self) -> None:
        """Send all early buckets that have not travelled, in their order."""
        while self._next < len(self._early):
            self._reduce_next()

    def send_late(self) -> None:
        """Send the late buckets, once other axes have summed their gradients."""
        for bucket in self._late:
            bucket.reduce()

    def finish(self) -> None:
        """Wait until every bucket is summed."""
        for then in (WeightBucket.wait, WeightBucket.sum_copies, WeightBucket.wait, WeightBucket.complete_sum, WeightBucket.wait):
            for bucket in (*self._early, *self._late):
                then(bucket)

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
        self._open[bucket] = sum(self._left[row.parameter] > 0 for row in bucket.rows)
        if self._under_way is not None:
            self._under_way.wait()  # and free its gradients: two buckets are held at most
        bucket.reduce()
        self._under_way = bucket
