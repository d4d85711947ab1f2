"""AdamW's step on the host, of buckets whose float32 weights and states are in its memory (ZeRO-Offload: arXiv:2101.06840).

A rank's shard of each bucket is stepped in pieces: its summed gradients are copied to the host, stepped with there, and the new weights are
copied back in the type that forward uses. While the host steps one piece, the gradients of the next and the weights of the one before are
being copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan.native.optimizer_step import AT_HAND, PIECE, stepped_at_once
from ..rank_parameter import optimizer_state
from .data_parallel.weight_buckets import WeightBucket
from .rounded_moments import MomentPart, MomentRounding, adamw_of_part, step_adamw

PART = 2**20  # elements that are cast, stepped and cast again at once: they stay in a processor's cache (scripts/bench_host_step.py)


class CopyStream:
    """Copies in one direction between a device and its host, one after the other, beside what the device computes. Where the device is a
    CPU, each is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes = 0  # copied so far

    def wait_for_device(self) -> None:
        """Have the copies to come wait for the work that the device has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def begin(self, into: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begin a copy. Return its end; None: it is done."""
        self.bytes += source.nbytes
        if self._stream is None:
            into.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end


class HostPiece(NamedTuple):
    """Elements [start, stop) of a rank's shard of a bucket; `is_last` of them."""

    bucket: WeightBucket
    start: int
    stop: int
    is_last: bool


class HostOptimizer:
    """Steps buckets on the host, piece by piece."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[WeightBucket],
        device: torch.device,
        types: tuple[torch.dtype, torch.dtype],
        rounding: MomentRounding | None,
    ) -> None:
        """`types` are those of forward's weights and of gradients."""
        weight, gradient = types
        self._optimizer, self._device, self._rounding = optimizer, device, rounding
        self._group_of = {master: group for group in optimizer.param_groups for master in group["params"]}
        self._pieces = [piece for bucket in buckets for piece in _pieces(bucket)]
        self.to_host, self.to_device = CopyStream(device), CopyStream(device)
        held = min(PIECE, sum(each.master.numel() for each in buckets))
        self._gradients, self._weights = (
            [torch.empty(held, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(AT_HAND)] for dtype in (gradient, weight)
        )

    def step(self, divisor: Tensor) -> None:
        """Step with the gradients over `divisor`, a number without dims, and gather the weights that other ranks step."""
        on_host = divisor.to("cpu", torch.float32)
        self.to_host.wait_for_device()
        self.to_device.wait_for_device()
        sent: list[torch.cuda.Event | None] = [None] * AT_HAND
        gathers = []
        arrival = self._fetch(0) if self._pieces else None
        for at, piece in enumerate(self._pieces):
            arrived, turn = arrival, at % AT_HAND
            arrival = self._fetch(at + 1) if at + 1 < len(self._pieces) else None
            _wait(arrived)
            _wait(sent[turn])  # the weights of the piece that had this memory have left
            self._step_piece(piece, self._gradients[turn], self._weights[turn], on_host)
            own = piece.bucket.own_weights[piece.start : piece.stop]
            sent[turn] = end = self.to_device.begin(own, self._weights[turn][: own.numel()])
            if piece.is_last:
                if end is not None:
                    torch.cuda.current_stream(self._device).wait_event(end)
                gathers.append(piece.bucket.gather())
        for work in filter(None, gathers):
            work.wait()
        for each in sent:
            _wait(each)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the host's memory that copies go through."""
        yield from (*self._gradients, *self._weights)

    def _fetch(self, at: int) -> torch.cuda.Event | None:
        bucket, start, stop, _ = self._pieces[at]
        return self.to_host.begin(self._gradients[at % AT_HAND][: stop - start], bucket.shard_gradient[start:stop])

    def _step_piece(self, piece: HostPiece, gradients: Tensor, copy: Tensor, divisor: Tensor) -> None:
        """Step the weights of a piece with `gradients`, and leave them in `copy` as wide as forward's."""
        bucket, start, stop, is_last = piece
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

    def _parts(self, bucket: WeightBucket, state: dict[str, Tensor], start: int, stop: int) -> Iterator[MomentPart]:
        """Yield elements [start, stop) of a rank's shard of a bucket in parts that stay in a processor's cache."""
        if self._rounding:
            yield from self._rounding.parts(bucket, state["step"] + 1, stepped_at_once("cpu"), start, stop)
            return
        for first in range(start, stop, PART):
            yield MomentPart(slice(first, min(first + PART, stop)), None)


def _pieces(bucket: WeightBucket) -> Iterator[HostPiece]:
    """Yield the pieces of this rank's shard of a bucket; one without elements where it has none, since its others are gathered."""
    elements = bucket.master.numel()
    for start in range(0, max(elements, 1), PIECE):
        stop = min(start + PIECE, elements)
        yield HostPiece(bucket, start, stop, stop == elements)


def _wait(event: torch.cuda.Event | None) -> None:
    """Have the host wait until a copy is done."""
    if event is not None:
        event.synchronize()
