"""Gradients of several parameters, which are added to those before in one kernel; tensor by tensor where gradients have another type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .weight_buckets import WeightBucket


class GradientsTogether:
    """Parameters to which autograd gives their gradients at about the same time, and whose buckets take them at once.

    Between micro-batches these parameters have no gradient: autograd keeps one as it comes, and adds nothing.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_of: Mapping[nn.Parameter, WeightBucket]) -> None:
        self.parameters, self._bucket_of = parameters, bucket_of
        self._buckets = list({bucket_of[each]: None for each in parameters})
        self._filled: list[int] | None = None  # the buckets' `fills` in which all parameters have had a gradient
        self._places: list[Tensor] = []  # where these are then

    def take(self) -> Sequence[nn.Parameter]:
        """Take the gradients that are there, and return whose they are."""
        gradients = [each.grad for each in self.parameters]
        come = [gradient for gradient in gradients if gradient is not None]
        if not come:
            return ()
        parameters, fills = self.parameters, [each.fills for each in self._buckets]
        if len(come) == len(gradients) and fills == self._filled:
            torch._foreach_add_(self._places, come)
        else:
            parameters = [each for each, gradient in zip(self.parameters, gradients, strict=True) if gradient is not None]
            self._places = add_gradients(parameters, come, self._bucket_of)
            self._filled = [each.fills for each in self._buckets] if len(come) == len(gradients) else None
            if any(bucket.often for bucket in self._buckets):  # other memory at each micro-batch, of which no view may be left
                self._places, self._filled = [], None
        for each in parameters:
            each.grad = None
        return parameters


def add_gradients(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], bucket_of: Mapping[nn.Parameter, WeightBucket]
) -> list[Tensor]:
    """Add gradients to those of earlier micro-batches in one kernel, and store a step's first ones in one. Return where they are now."""
    places, first, further = list[Tensor](), list[int](), list[int]()
    for at, parameter in enumerate(parameters):
        place, has_come = bucket_of[parameter].take_place(parameter)
        places.append(place)
        (further if has_come else first).append(at)
    if first:
        torch._foreach_copy_([places[at] for at in first], [gradients[at] for at in first])
    if further:
        torch._foreach_add_([places[at] for at in further], [gradients[at] for at in further])
    return places
