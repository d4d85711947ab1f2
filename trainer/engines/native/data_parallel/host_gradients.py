"""Sums of gradients in the host's memory, of rows of weights that are there (host_rows.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....layers.group_messages import all_reduce
from ....layers.rank_group import Group
from ....plan.native.host_rows import GRADIENTS_AT_ONCE
from ....plan.native.optimizer_step import AT_HAND
from .copy_stream import CopyStream, wait_for_copies
from .sharded_weights import ShardedWeight


class HostGradients:
    """Takes the gradients of this rank's rows from the device as soon as fully_shard has summed them over ranks, and adds them up on the
    host in float32 over the micro-batches of a step.

    They travel in the type in which ranks sum them, through pinned buffers in turn. A buffer's gradients are added when it is needed again:
    the device has been given a part of backward by then. Few layers' gradients are on the device at once.
    """

    def __init__(self, weights: Sequence[ShardedWeight], device: torch.device, dtype: torch.dtype) -> None:
        self._weights = {each.row.parameter: each for each in weights}
        self._arrived: dict[ShardedWeight, int] = {}  # elements that were added in this step
        self.to_host = CopyStream(device)
        self._most = min(GRADIENTS_AT_ONCE, sum(each.master.numel() for each in weights))
        self._buffers = [torch.empty(self._most, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(AT_HAND)]
        self._parts: list[list[tuple[ShardedWeight, int, slice]]] = [[] for _ in range(AT_HAND)]  # of each buffer: first element, place
        self._ends: list[Any] = [None] * AT_HAND
        self._turn = self._filled = 0
        for each in self._weights:
            each.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step: the gradients that come first replace those of the step before."""
        self._arrived = dict.fromkeys(self._weights.values(), 0)

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Begin to copy a gradient to the host, and drop it."""
        sharded: Any = parameter.grad
        gradient, weight, start = sharded.to_local().reshape(-1), self._weights[parameter], 0
        parameter.grad = None
        self.to_host.wait_for_device()
        while start < gradient.numel():
            if self._filled == self._most:
                self._turn, self._filled = (self._turn + 1) % AT_HAND, 0
                self._add(self._turn)
            stop = min(gradient.numel(), start + self._most - self._filled)
            place = slice(self._filled, self._filled + stop - start)
            self._ends[self._turn] = self.to_host.begin([(self._buffers[self._turn][place], gradient[start:stop])])
            self._parts[self._turn].append((weight, start, place))
            start, self._filled = stop, place.stop

    @torch.no_grad()
    def finish(self) -> None:
        """Add all that was taken: the sums are whole."""
        for later in range(1, AT_HAND + 1):
            self._add((self._turn + later) % AT_HAND)
        self._filled = 0
        for weight, elements in self._arrived.items():
            if not elements:
                weight.shard_gradient.zero_()

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the host's memory that copies go through."""
        yield from self._buffers

    def _add(self, turn: int) -> None:
        """Add the gradients of a buffer to their sums."""
        wait_for_copies(self._ends[turn])
        for weight, start, place in self._parts[turn]:
            length = place.stop - place.start
            into, gradient = weight.shard_gradient[start : start + length], self._buffers[turn][place]
            if self._arrived[weight] < weight.master.numel():
                into.copy_(gradient)
            else:
                into.add_(gradient)
            self._arrived[weight] += length
        self._parts[turn].clear()


def sum_on_device(gradient: Tensor, group: Group, device: torch.device) -> None:
    """Sum a gradient, which may be in the host's memory, in place over the ranks of a group."""
    there = gradient.to(device)
    all_reduce(there, group)
    if there is not gradient:
        gradient.copy_(there)
