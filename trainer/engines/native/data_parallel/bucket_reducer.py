"""When each bucket of gradients is summed over the data axis: as soon as it is complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .fused_gradient_sums import GradientsTogether, add_gradients
from .weight_buckets import WeightBucket

if TYPE_CHECKING:
    from .host_gradients import HostGradients


class BucketReducer:
    """Takes each weight's gradients of a step, and sums each bucket over the data axis as soon as it is complete.

    Gradients of `layers` are taken layer by layer (`watch_layer`), in one kernel; others one by one, or by autograd.
    `uses` is how often a weight gets a gradient in a micro-batch. A bucket is complete after the last micro-batch, or after each one if
    it travels often. Late buckets wait until other axes have summed them.
    """

    host: HostGradients | None = None  # it sums none on the host

    def __init__(
        self, buckets: Sequence[WeightBucket], uses: Mapping[nn.Parameter, int], layers: Iterable[nn.Module], *, overlap: bool
    ) -> None:
        self._early = [each for each in buckets if not each.kind.late]
        self._late = [each for each in buckets if each.kind.late]
        self._uses, self._overlap = uses, overlap
        self._bucket_of = {row.parameter: bucket for bucket in buckets for row in bucket.rows}
        self._sends = any(map(_is_sent, buckets))
        self._layers = {each: self._taken_together(each) for each in layers}
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
            add_gradients([parameter], [parameter.grad], self._bucket_of)
            parameter.grad = None
        self._count(parameter, bucket)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a parameter whose product was deferred."""
        add_gradients([parameter], [gradient], self._bucket_of)
        self._count(parameter, self._bucket_of[parameter])

    def watch_layer(self, layer: nn.Module, x: Tensor) -> None:
        """Take the gradients of a layer's parameters together, as soon as backward has that of its input x."""
        if x.requires_grad:
            x.register_hook(lambda _: self._take_layer(layer))  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        """Take what is left: where a layer's input is no result, its gradient may come before those of parameters."""
        for layer in self._layers:
            self._take_layer(layer)

    def _take_layer(self, layer: nn.Module) -> None:
        for some in self._layers[layer]:
            come = some.take()
            for each in come if self._sends else ():
                self._count(each, self._bucket_of[each])

    def _taken_together(self, layer: nn.Module) -> list[GradientsTogether]:
        """Return the trained parameters of a layer, those of each bucket that travels often apart: few of these are held at once."""
        parts = defaultdict[WeightBucket | None, list[nn.Parameter]](list)
        for each in layer.parameters():
            if bucket := self._bucket_of.get(each):
                parts[bucket if bucket.often else None].append(each)
        return [GradientsTogether(each, self._bucket_of) for each in parts.values()]

    def hooked_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters each of whose gradients a hook must pass to `take_gradient`."""
        together = {each for groups in self._layers.values() for some in groups for each in some.parameters}
        for parameter, bucket in self._bucket_of.items():
            is_sent = self._overlap and _is_sent(bucket) and not bucket.kind.late
            if parameter not in together and (is_sent or not bucket.in_place):
                yield parameter

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


def _is_sent(bucket: WeightBucket) -> bool:
    """Whether a bucket's gradients are summed over several ranks."""
    return bool(bucket.sharing or bucket.copies or bucket.servers)
