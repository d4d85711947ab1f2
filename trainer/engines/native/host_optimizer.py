"""AdamW's step on the host, of buckets whose float32 weights and states are in its memory (ZeRO-Offload: arXiv:2101.06840).

A rank's shard of each bucket is stepped in pieces: its summed gradients are copied to the host, stepped with there, and the new weights are
copied back in the type that forward uses. While the host steps one piece, the gradients of the next and the weights of the one before are
being copied. At ZeRO 3 a piece holds this rank's rows of several weights, most of which are small; rows whose gradients and weights are on
the host anyway (parallel.offload.parameters) are stepped where they are, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.native.optimizer_step import AT_HAND, PIECE, stepped_at_once
from ..rank_parameter import optimizer_state
from .data_parallel.copy_stream import CopyStream, wait_for_copies
from .data_parallel.sharded_weights import ShardedWeight
from .data_parallel.weight_buckets import WeightBucket
from .rounded_moments import MomentPart, MomentRounding, adamw_of_part, step_adamw

PART = 2**20  # elements that are cast, stepped and cast again at once: they stay in a processor's cache (scripts/bench_host_step.py)
CUT = 64  # a shard is cut at multiples of it: the same elements are left over from a processor's vectors as of a whole shard


class PiecePart(NamedTuple):
    """Elements [start, stop) of a rank's shard of a bucket, of which the first is element `at` of a piece; `is_last` of the shard."""

    bucket: WeightBucket | ShardedWeight
    start: int
    stop: int
    at: int
    is_last: bool

    @property
    def place(self) -> slice:
        """Where it is in its piece."""
        return slice(self.at, self.at + self.stop - self.start)


HostPiece = tuple[PiecePart, ...]  # what is copied, stepped and copied back at once


class HostOptimizer:
    """Steps buckets on the host, piece by piece."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[WeightBucket | ShardedWeight],
        device: torch.device,
        types: tuple[torch.dtype, torch.dtype],
        rounding: MomentRounding | None,
    ) -> None:
        """`types` are those of forward's weights and of the gradients that are stepped with."""
        weight, gradient = types
        self._optimizer, self._device, self._rounding = optimizer, device, rounding
        self._group_of = {master: group for group in optimizer.param_groups for master in group["params"]}
        self._rows_on_host = [each for each in buckets if each.host_rows is not None]  # weights and gradients are on the host
        copied = [each for each in buckets if each.host_rows is None]
        self._pieces = list(_pieces(copied))
        self.to_host, self.to_device = CopyStream(device), CopyStream(device)
        held = min(PIECE, sum(each.master.numel() for each in copied))
        self._gradients, self._weights = (
            [torch.empty(held, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(AT_HAND)] for dtype in (gradient, weight)
        )

    def step(self, divisor: Tensor) -> None:
        """Step with the gradients over `divisor`, a number without dims, and gather the weights that other ranks step."""
        on_host = divisor.to("cpu", torch.float32)
        for bucket in self._rows_on_host:
            whole = PiecePart(bucket, 0, bucket.master.numel(), 0, is_last=True)
            self._step_part(whole, bucket.shard_gradient, bucket.own_weights, on_host)
        self.to_host.wait_for_device()
        self.to_device.wait_for_device()
        sent: list[torch.cuda.Event | None] = [None] * AT_HAND
        gathers = []
        arrival = self._fetch(0) if self._pieces else None
        for at, piece in enumerate(self._pieces):
            arrived, turn = arrival, at % AT_HAND
            arrival = self._fetch(at + 1) if at + 1 < len(self._pieces) else None
            wait_for_copies(arrived)
            wait_for_copies(sent[turn])  # the weights of the piece that had this memory have left
            for part in piece:
                self._step_part(part, self._gradients[turn][part.place], self._weights[turn][part.place], on_host)
            weights = ((each.bucket.own_weights[each.start : each.stop], self._weights[turn][each.place]) for each in piece)
            sent[turn] = end = self.to_device.begin(weights)
            if end is not None:
                torch.cuda.current_stream(self._device).wait_event(end)
            gathers += [each.bucket.gather() for each in piece if each.is_last]
        for work in filter(None, gathers):
            work.wait()
        for each in sent:
            wait_for_copies(each)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the host's memory that copies go through."""
        yield from (*self._gradients, *self._weights)

    def _fetch(self, at: int) -> torch.cuda.Event | None:
        held = self._gradients[at % AT_HAND]
        return self.to_host.begin((held[each.place], each.bucket.shard_gradient[each.start : each.stop]) for each in self._pieces[at])

    def _step_part(self, piece: PiecePart, gradients: Tensor, copy: Tensor, divisor: Tensor) -> None:
        """Step the weights of a part of a piece with its `gradients`, and leave them in its `copy` as wide as forward's."""
        bucket, start, stop, _, is_last = piece
        group: dict[str, Any] = self._group_of[bucket.master]
        weights, state = bucket.master.data, optimizer_state(self._optimizer, bucket.master)
        covered = start
        for part in self._parts(bucket, state, start, stop):
            place, here = part.place, slice(part.place.start - start, part.place.stop - start)
            own = gradients[here].float()
            if self._rounding:
                step_adamw(part, weights, own, state, group, divisor=divisor, skip=None)
            else:
                moments = state["exp_avg"][place], state["exp_avg_sq"][place]
                adamw_of_part(weights[place], own, *moments, state["step"], group, divisor=divisor, skip=None)
            copy[here].copy_(weights[place])
            covered = place.stop
        copy[covered - start : stop - start].zero_()  # padding
        if is_last:
            state["step"] += 1

    def _parts(self, bucket: WeightBucket | ShardedWeight, state: dict[str, Tensor], start: int, stop: int) -> Iterator[MomentPart]:
        """Yield elements [start, stop) of a rank's shard of a bucket in parts that stay in a processor's cache."""
        if self._rounding:
            yield from self._rounding.parts(bucket, state["step"] + 1, stepped_at_once("cpu"), start, stop)
            return
        for first in range(start, stop, PART):
            yield MomentPart(slice(first, min(first + PART, stop)), None)


def _pieces(buckets: Sequence[WeightBucket | ShardedWeight]) -> Iterator[HostPiece]:
    """Yield the pieces of this rank's shards of buckets. A bucket that the step gathers ends its piece: one without elements where this
    rank has none of it, since its others are gathered."""
    parts, filled = list[PiecePart](), 0
    for bucket in buckets:
        elements, start, is_last = bucket.master.numel(), 0, False
        while not is_last:
            stop = min(start + PIECE - filled, elements)
            is_last = stop == elements
            if not is_last:
                stop -= (stop - start) % CUT
            if is_last or stop > start:
                parts.append(PiecePart(bucket, start, stop, filled, is_last))
            start, filled = stop, filled + stop - start
            if not is_last or isinstance(bucket, WeightBucket):
                yield tuple(parts)
                parts, filled = [], 0
    if parts:
        yield tuple(parts)
