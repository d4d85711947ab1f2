"""AdamW's step on the host, of buckets whose float32 weights and states are in its memory (ZeRO-Offload: arXiv:2101.06840).

A bucket's summed gradients are copied to the host, stepped with there, and its new weights are copied back in the type that forward uses.
While the host steps one bucket, the gradients of the next and the weights of the one before are on their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..rank_parameter import optimizer_state
from .data_parallel.weight_buckets import WeightBucket

PART = 2**20  # elements that are cast, stepped and cast again at once: they stay in a processor's cache (scripts/bench_host_step.py)
TURNS = 2  # buckets on their way at once


class CopyStream:
    """Copies in one direction between a device and its host, beside what the device computes. Where the device is a CPU, each is done at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes = 0  # copied so far

    def begin(self, into: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begin a copy that waits for the work which the device has been given. Return its end; None: it is done."""
        self.bytes += source.nbytes
        if self._stream is None:
            into.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            end: torch.cuda.Event = self._stream.record_event()
        return end


class HostOptimizer:
    """Steps buckets on the host, one after the other."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[WeightBucket],
        device: torch.device,
        types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        """`types` are those of forward's weights and of gradients."""
        weight, gradient = types
        self._optimizer, self._buckets, self._device = optimizer, list(buckets), device
        self._group_of = {master: group for group in optimizer.param_groups for master in group["params"]}
        self.to_host, self.to_device = CopyStream(device), CopyStream(device)
        self._gradients, self._weights = (list(self._staging(each)) for each in (gradient, weight))

    def step(self, divisor: Tensor) -> None:
        """Step with the gradients over `divisor`, a number without dims, and gather the weights that other ranks step."""
        on_host = divisor.to("cpu", torch.float32)
        sent: dict[int, torch.cuda.Event | None] = {}
        gathers = []
        arrival = self._fetch(0) if self._buckets else None
        for at, bucket in enumerate(self._buckets):
            arrived, turn = arrival, at % TURNS
            arrival = self._fetch(at + 1) if at + 1 < len(self._buckets) else None
            _wait(arrived)
            _wait(sent.get(turn))  # the weights of two buckets before have left
            self._step_bucket(bucket, self._gradients[turn], self._weights[turn], on_host)
            own = bucket.own_weights
            sent[turn] = end = self.to_device.begin(own, self._weights[turn][: own.numel()])
            if end is not None:
                torch.cuda.current_stream(self._device).wait_event(end)
            gathers.append(bucket.gather())
        for work in filter(None, gathers):
            work.wait()
        for each in sent.values():
            _wait(each)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the host's memory that copies go through."""
        yield from (*self._gradients, *self._weights)

    def _staging(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield memory for the shards that are on their way at once, pinned where a GPU copies it."""
        sizes = [each.master.numel() for each in self._buckets]
        for _ in range(min(TURNS, len(sizes))):
            yield torch.empty(max(sizes), dtype=dtype, pin_memory=self._device.type == "cuda")

    def _fetch(self, at: int) -> torch.cuda.Event | None:
        gradient = self._buckets[at].shard_gradient
        return self.to_host.begin(self._gradients[at % TURNS][: gradient.numel()], gradient)

    def _step_bucket(self, bucket: WeightBucket, gradients: Tensor, copy: Tensor, divisor: Tensor) -> None:
        """Step a bucket's weights, and leave them in `copy` as wide as forward's."""
        group: dict[str, Any] = self._group_of[bucket.master]
        weights, state = bucket.master.data, optimizer_state(self._optimizer, bucket.master)
        (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        for start in range(0, weights.numel(), PART):
            part = slice(start, min(start + PART, weights.numel()))
            adamw(
                [weights[part]],
                [gradients[part].float()],
                [mean[part]],
                [square[part]],
                [],
                [state["step"].clone()],  # each part's call counts it
                foreach=False,
                fused=True,
                grad_scale=divisor,
                found_inf=None,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            copy[part].copy_(weights[part])
        state["step"] += 1


def _wait(event: torch.cuda.Event | None) -> None:
    """Have the host wait until a copy is done."""
    if event is not None:
        event.synchronize()
