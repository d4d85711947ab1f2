"""The step that workers take together after steps alone: they average their weights, and an outer optimizer steps with what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....layers.rank_group import Group
from ....parallel.process_groups import Grid
from ....plan.layout.workers import OUTER_MOMENTUM
from ....plan.native.buckets import consecutive_groups
from ....spec.run import Run
from ...rank_parameter import STATES, optimizer_state
from .sharded_weights import ShardedWeight
from .weight_buckets import MASTER_DTYPE, WeightBucket


class WorkerAverage:
    """Averages this rank's float32 weights with those that the other workers step in their place (arXiv:1805.09767).

    With an outer optimizer (arXiv:2311.08105) the gradient is the weights after the last step together, which are kept, less the
    mean; its momentum is one of the optimizer's states. Afterwards all workers have the same weights.
    """

    def __init__(self, run: Run, grid: Grid, buckets: Sequence[WeightBucket | ShardedWeight], optimizer: torch.optim.Optimizer) -> None:
        self._buckets, self._optimizer = buckets, optimizer
        self._outer, self._most = run.parallel.sync.outer, run.parallel.bucket
        self._groups = {expert: grid.group("expert_workers" if expert else "workers") for expert in (False, True)}
        self._agreed: list[Tensor] = []
        if not self._outer.only_averages:
            self._agreed = [each.master.detach().clone() for each in buckets]
        if self._outer.momentum:
            for each in buckets:
                optimizer_state(optimizer, each.master)[OUTER_MOMENTUM] = torch.zeros_like(each.master)

    @property
    def workers(self) -> int:
        """The number of workers."""
        group = self._groups[False]
        assert group is not None
        return group.size

    @torch.no_grad()
    def step(self) -> None:
        """Step together. The narrow copies of weights that forward uses follow."""
        self._average([(each, each.master.data) for each in self._buckets])
        for bucket, agreed in zip(self._buckets, self._agreed, strict=True) if self._agreed else ():
            self._take_outer_step(bucket, agreed)
        gathers = []
        for each in self._buckets:
            each.copy_master()
            gathers.append(each.gather())
        for work in filter(None, gathers):
            work.wait()

    @torch.no_grad()
    def average_states(self) -> None:
        """Average the optimizer's states too: a checkpoint holds one of each, which any number of workers can begin from."""
        for kind in STATES:
            held = ((each, self._optimizer.state[each.master].get(kind)) for each in self._buckets)
            if kind != OUTER_MOMENTUM:  # which all workers have alike
                self._average([(bucket, state) for bucket, state in held if isinstance(state, Tensor)])

    def restart(self) -> None:
        """Take the weights that were loaded as those of a step together."""
        for bucket, agreed in zip(self._buckets, self._agreed, strict=True) if self._agreed else ():
            agreed.copy_(bucket.master.data)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield what is kept beside the optimizer's states."""
        yield from self._agreed

    def _take_outer_step(self, bucket: WeightBucket | ShardedWeight, agreed: Tensor) -> None:
        outer, mean = self._outer, bucket.master.data
        change = mean.neg_().add_(agreed)  # in the memory of the weights
        if outer.momentum:
            momentum = optimizer_state(self._optimizer, bucket.master)[OUTER_MOMENTUM]
            momentum.mul_(outer.momentum).add_(change)
            change = change.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        agreed.sub_(change, alpha=outer.lr)
        bucket.master.data.copy_(agreed)

    def _average(self, rows: Sequence[tuple[WeightBucket | ShardedWeight, Tensor]]) -> None:
        """Replace each tensor by its mean over the workers, in messages of at most parallel.bucket elements, or of one tensor."""
        for expert, group in self._groups.items():
            some = [tensor.view(-1) for bucket, tensor in rows if bucket.kind.expert == expert and tensor.numel()]
            for tensors in consecutive_groups(some, self._most, Tensor.numel):
                assert group is not None
                _replace_by_mean(tensors, group)


def _replace_by_mean(tensors: list[Tensor], group: Group) -> None:
    """Replace flat tensors by their means over the ranks of a group, in one message."""
    flat = (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(MASTER_DTYPE)  # which moments may not be
    dist.all_reduce(flat, group=group.handle)
    flat /= group.size
    if flat.data_ptr() != tensors[0].data_ptr():
        for tensor, mean in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
            tensor.copy_(mean)
