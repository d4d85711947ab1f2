"""ZeRO 3 of engine `native`: this rank's rows of weights, and when their gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....plan.axes.weight_slices import WeightShard
from ....plan.native.buckets import Bucket, BucketKind
from ...rank_parameter import RankParameter
from .shard_groups import RowGroups
from .weight_buckets import MASTER_DTYPE, Piece


class HostSums(Protocol):
    """What sums gradients in the host's memory (host_gradients.py)."""

    def begin(self) -> None:
        """Begin a step."""

    def finish(self) -> None:
        """Make the sums whole."""

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the host's memory that copies go through."""


def keep_own_rows(parameter: nn.Parameter, shard: WeightShard, groups: RowGroups, dtype: torch.dtype, *, on_host: bool) -> nn.Parameter:
    """Return a parameter of the same shape without memory, which keeps this rank's rows of the values in type `dtype` as `own_rows`: on
    its device, or at once in the host's memory."""
    group = groups[shard.expert].sharing
    assert group is not None
    kept = nn.Parameter(torch.empty_like(parameter.data, dtype=dtype, device="meta"), requires_grad=parameter.requires_grad)
    chunks = parameter.data.chunk(group.size)
    own = chunks[group.rank] if group.rank < len(chunks) else parameter.data[:0]
    kept.own_rows = own.to("cpu" if on_host else own.device, dtype, copy=True)  # type: ignore[attr-defined]
    kept.is_expert = shard.expert  # type: ignore[attr-defined]
    return kept


@contextmanager
def collect_gathered(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that fills with the gathered weights of each module that runs in the block."""
    gathered: list[Tensor] = []
    hooks = [
        each.register_forward_pre_hook(lambda module, _: gathered.extend(module.parameters()))
        for module in modules
        for each in module.modules()
        if hasattr(each, "unshard")  # torch's FSDPModule, whose import takes a second
    ]
    try:
        yield gathered
    finally:
        for hook in hooks:
            hook.remove()


def drop_gathered(modules: Sequence[nn.Module]) -> None:
    """Drop the weights that forward has left gathered, so that the next one gathers what their rows hold then: fully_shard keeps those of
    a whole part, its embedding, norm and head, from an evaluation to the next backward."""
    for each in _gathering_modules(modules):
        each.reshard()


def _gathering_modules(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield those of the modules, and of what is in them, that are torch's FSDPModule, without its import."""
    return (each for module in modules for each in module.modules() if hasattr(each, "reshard"))


def local_rows(sharded: Any) -> Tensor:
    """Return the rows of a sharded tensor that this rank has: those in the host's memory, where they are there."""
    on_host: Tensor | None = getattr(sharded, "host_rows", None)
    rows: Tensor = sharded.detach().to_local() if on_host is None else on_host
    return rows


def kind_and_rows(parameter: nn.Parameter) -> tuple[str, Tensor]:
    """Return the kind of bytes and the rows of what this rank has of a weight, which may be whole."""
    on_host: Tensor | None = getattr(parameter, "host_rows", None)
    if on_host is not None:
        return "host", on_host
    return "weights", local_rows(parameter) if hasattr(parameter, "to_local") else parameter.data


class ShardedWeight:
    """One weight, of which this rank has some rows in float32: those that fully_shard gathers, or with `on_host` others in the host's
    memory, where the rows that are gathered may be too (`host_rows`), with the sums of their gradients. It has what `WeightBucket` offers
    to the engine."""

    def __init__(self, row: RankParameter, kind: BucketKind, groups: RowGroups, *, on_host: bool) -> None:
        self.row, self.rows, self.kind, self.on_host = row, [row], kind, on_host
        group = groups[row.shard.expert]
        self.sharing, self.copies = group.sharing, group.copies
        self._start = first_element(row, groups)
        self.host_rows: Tensor | None = getattr(row.parameter, "host_rows", None)
        own = self.own_weights
        self._steps_gathered = not on_host or (self.host_rows is not None and own.dtype == MASTER_DTYPE)
        stepped = own if self._steps_gathered else own.to("cpu", MASTER_DTYPE, copy=True)
        self.master = nn.Parameter(stepped, requires_grad=False)
        self._host_sum = None if self.host_rows is None else torch.zeros(own.numel(), dtype=MASTER_DTYPE)

    @property
    def pieces(self) -> Iterator[Piece]:
        if self.master.numel():
            yield Piece(self.row, self._start, 0, self.master.numel())

    def stepped_part(self, name: str, rank: int) -> range:
        """The flat elements of the weight that a rank of `sharing` steps."""
        shape, ranks = self.row.parameter.shape, self.sharing.size if self.sharing else 1
        first, last = (min(-(-shape[0] // ranks) * each, shape[0]) * (shape.numel() // shape[0]) for each in (rank, rank + 1))
        return range(first, last)

    def place_in_shard(self, name: str) -> int:
        """0: its rows are all that this rank has of the weight."""
        return 0

    @property
    def shard_gradient(self) -> Tensor:
        if self._host_sum is not None:
            return self._host_sum
        gradient = self.row.parameter.grad
        return torch.zeros_like(self.own_weights, dtype=MASTER_DTYPE) if gradient is None else local_rows(gradient).view(-1)

    def own_gradient(self, parameter: nn.Parameter) -> Tensor:
        return self.shard_gradient

    @property
    def own_weights(self) -> Tensor:
        """This rank's rows of the weight that forward gathers, flat."""
        return local_rows(self.row.parameter).view(-1)

    @property
    def compute_copy(self) -> Tensor | None:
        """This rank's rows of the weight that forward gathers; None where they are the float32 rows that are stepped."""
        return None if self._steps_gathered else self.own_weights

    def copy_master(self) -> None:
        """Give the stepped rows to those that forward gathers, as wide as these are."""
        if (own := self.compute_copy) is not None:
            own.copy_(self.master.data)

    def gather(self) -> None:
        """Do nothing: forward gathers the weight."""

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weights" if self.host_rows is None else "host", self.own_weights
        if self._host_sum is not None:
            yield "host", self._host_sum
        if self.on_host:
            yield "host", self.master.data
        if self._host_sum is None and self.row.parameter.grad is not None:
            yield "gradients", self.shard_gradient


def sharded_weights(rows: Sequence[RankParameter], buckets: Sequence[Bucket], groups: RowGroups, *, on_host: bool) -> list[ShardedWeight]:
    """Return this rank's rows of trained weights, whose kinds are those of `buckets`."""
    kinds = {name: each.kind for each in buckets for name in each.names}
    return [ShardedWeight(row, kinds[row.name], groups, on_host=on_host) for row in rows if row.parameter.requires_grad]


def first_element(row: RankParameter, groups: RowGroups) -> int:
    """Return the flat element of a sharded parameter with which this rank's rows begin."""
    group = groups[row.shard.expert].sharing
    assert group is not None
    shape = row.parameter.shape
    return min(-(-shape[0] // group.size) * group.rank, shape[0]) * (shape.numel() // shape[0])


class ShardedReducer:
    """Decides when fully_shard gathers weights and sums gradients: around every micro-batch's passes, or (`once`) once a step.

    Where products of weights' gradients are deferred, `sum_gradients` sums a module's gradients with them, in their type `reduced`, after
    all actions; else it is None. `host` sums the gradients of rows that are on the host. It has what `BucketReducer` offers to the engine.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: Sequence[ShardedWeight],
        reduced: torch.dtype,
        sum_gradients: Callable[[nn.Module, dict[nn.Parameter, Tensor]], None] | None,
        host: HostSums | None,
        *,
        once: bool,
    ) -> None:
        assert once or sum_gradients is None, "weights are gathered until their gradients are computed"
        self._modules, self._weights, self._once = modules, weights, once
        self._reduced, self._sum_gradients, self.host = reduced, sum_gradients, host
        self._units = tuple(_gathering_modules(modules))
        self._deferred: dict[nn.Parameter, Tensor] = {}  # the sum of each gathered weight's gradients that were deferred

    def begin(self, micros: int) -> None:
        for unit in self._units:  # an evaluation leaves some gathered, and each step sends the messages of its plan
            unit.reshard()
        self._micros = micros
        self._done = [0] * len(self._modules)
        for each in self._weights:
            each.row.parameter.grad = None
        if self.host:
            self.host.begin()
        if self._once:
            for module in self._modules:
                _keep_gathered(module, keep=True)

    def before_backward(self, chunk: int) -> None:
        """Have the last backward of a part sum its gradients and drop its weights."""
        self._done[chunk] += 1
        last = self._done[chunk] == self._micros
        if self._once and last and self._sum_gradients is None:
            _keep_gathered(self._modules[chunk], keep=False)
        _sum_copies(self._modules[chunk], now=last)

    def after_backward(self) -> None:
        """Do nothing: fully_shard has taken all gradients."""

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a gathered weight whose product was deferred."""
        held = self._deferred.get(parameter)
        self._deferred[parameter] = gradient.to(self._reduced) if held is None else held.add_(gradient)

    def finish_backward(self) -> None:
        """Sum the gradients that backward has not summed, and drop the weights."""
        if self._sum_gradients:
            for module in self._modules:
                self._sum_gradients(module, self._deferred)
        if self.host:
            self.host.finish()

    def send_late(self) -> None:
        """Do nothing: no weight waits for other axes."""

    def finish(self) -> None:
        """Do nothing: backward has summed all gradients."""


def _sum_copies(module: Any, *, now: bool) -> None:
    """Have the backward that follows sum rows over the ranks that have the same ones, or only over those that it shards with."""
    module.set_requires_all_reduce(now)


def _keep_gathered(module: Any, *, keep: bool) -> None:
    module.set_reshard_after_forward(not keep)
    module.set_reshard_after_backward(not keep)
    module.set_requires_gradient_sync(not keep)
    module.set_is_last_backward(not keep)
