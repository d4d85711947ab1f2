"""The exponential moving average of the weights that engine `native` keeps beside those that it steps (optim.ema)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...plan.layout.checkpoint_kinds import AVERAGE
from ...spec.run import Run
from ..rank_parameter import optimizer_state
from .data_parallel.copy_stream import wait_for_device
from .data_parallel.sharded_weights import ShardedWeight, drop_gathered
from .data_parallel.weight_buckets import WeightBucket

EXCHANGED = 2**22  # elements that change places at once


class WeightAverage:
    """The float32 average of the weights that this rank steps: after each step that is taken, `optim.ema` of what it was and the rest of
    the stepped weights (torch.optim.swa_utils.get_ema_multi_avg_fn). It begins with the weights that the run begins with, and is one of
    the optimizer's states."""

    def __init__(
        self,
        run: Run,
        buckets: Sequence[WeightBucket | ShardedWeight],
        optimizer: torch.optim.Optimizer,
        modules: Sequence[nn.Module],
        device: torch.device,
    ) -> None:
        self._share, self._buckets, self._modules, self._device = 1 - run.optim.ema, buckets, modules, device
        self._states = [optimizer_state(optimizer, each.master) for each in buckets]
        for bucket, state in zip(buckets, self._states, strict=True):
            state[AVERAGE] = bucket.master.detach().clone()

    @torch.no_grad()
    def update(self, is_taken: Tensor) -> None:
        """Add the weights after a step, unless the step was skipped. `is_taken` is a number without dims on the rank's device, for which
        the host does not wait."""
        share: Tensor | float = self._share
        if is_taken.device.type == "cpu" or any(each.master.device != is_taken.device for each in self._buckets):
            if not is_taken:
                return
        else:
            share = is_taken.float() * self._share
        for average, bucket in zip(self._averages, self._buckets, strict=True):
            average.lerp_(bucket.master.data, share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs, have forward use the average; then the same bits as before. All ranks enter it."""
        self._exchange()
        yield
        self._exchange()

    @property
    def _averages(self) -> list[Tensor]:
        return [state[AVERAGE] for state in self._states]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Have the weights and their average change places, part by part, and give forward the weights that are stepped then."""
        if any(each.host_rows is not None for each in self._buckets):
            wait_for_device(self._device)  # it may still be copying rows that change here
        for average, bucket in zip(self._averages, self._buckets, strict=True):
            for one, other in zip(*(torch.split(each, EXCHANGED) for each in (average, bucket.master.data)), strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
            bucket.copy_master()
        for work in filter(None, [bucket.gather() for bucket in self._buckets]):
            work.wait()
        drop_gathered(self._modules)
