"""Buckets of weights: flat weights, their gradients and this rank's shard of them, and their messages on the data axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....plan.native.buckets import Bucket
from ...rank_parameter import RankParameter
from .gradient_sums import SumRounds, SumUnderWay, received_tensors
from .shard_groups import ShardGroups

MASTER_DTYPE = torch.float32


class Piece(NamedTuple):
    """The elements of a parameter that are in a rank's shard of a bucket: where they begin in the parameter and in the shard."""

    row: RankParameter
    start: int
    offset: int
    length: int


class WeightBucket:
    """One bucket on this rank. Its parameters are views of one flat tensor.

    The ranks of `sharing` each step a shard of it, those of `copies` the same one. At ZeRO 0 all step the whole bucket, or parameter
    servers do, each its part.

    Gradients are summed in `gradients`. Where autograd adds to them, because they are as wide as the weights, each parameter's gradient
    is a view of it (`in_place`); else the first of a step is stored there. At ZeRO 2 it is there only while a micro-batch's backward fills
    it, except for a late bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        rows: Mapping[str, RankParameter],
        groups: ShardGroups,
        zero: int,
        gradient: torch.dtype,
        *,
        by_autograd: bool,
        on_host: bool = False,
    ) -> None:
        """`by_autograd`: autograd adds gradients where it can; else all are given their place by `take_place`.
        `on_host`: the float32 weights that are stepped are in the host's memory."""
        self.bucket, self.kind = bucket, bucket.kind
        sharing, self.copies, servers, self.levels = groups
        self.sharing, self.servers = sharing, servers
        self.often = bool(sharing) and zero == 2 and not bucket.kind.late  # it travels at every micro-batch
        self.rows = [rows[name] for name in bucket.names]
        first = self.rows[0].parameter
        self.weights = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
        self._gradient_type = gradient
        self._starts = {row.parameter: start for row, start in zip(self.rows, bucket.starts, strict=True)}
        for parameter, view in self._views(self.weights):
            view.copy_(parameter.data)
            parameter.data = view
        whole = bucket.shard(sharing.size, sharing.rank) if sharing else bucket.shard(1, 0)
        self.shard = servers.own(bucket) if servers else whole
        self.on_host, self.host_rows = on_host, None
        own = self.own_weights
        stepped = own.to("cpu", MASTER_DTYPE, copy=True) if on_host else own.to(MASTER_DTYPE)
        self.master = nn.Parameter(stepped, requires_grad=False)
        self.gradients: Tensor | None = None
        self._held: dict[nn.Parameter, Tensor] = {}  # each parameter's gradient in `gradients`
        self.fills = 0  # how often the bucket was made empty, or got other memory for gradients
        self._filled: set[nn.Parameter] = set()  # parameters whose gradient has arrived since the bucket was empty
        self.in_place = gradient == first.dtype and by_autograd and not self.often
        if not self.often:
            self._allocate()
        self.rounds: SumRounds | None = None  # at ZeRO 0, where gradients are summed in several messages
        self._summed: Tensor | None = None  # this rank's shard of the sum, at ZeRO 1 and 2
        self._work: Any = None
        self._scattered: Tensor | None = None
        self._sent: Tensor | None = None

    @property
    def pieces(self) -> Iterator[Piece]:
        """The elements of each parameter that this rank steps."""
        for row in self.rows:
            start = self._starts[row.parameter]
            first, last = max(start, self.shard.start), min(start + row.parameter.numel(), self.shard.stop)
            if first < last:
                yield Piece(row, first - start, first - self.shard.start, last - first)

    def stepped_part(self, name: str, rank: int) -> range:
        """The flat elements of a weight that a rank of `sharing` steps."""
        at = self.bucket.names.index(name)
        start, elements = self.bucket.starts[at], self.rows[at].parameter.numel()
        shard = self.bucket.shard(self.sharing.size, rank) if self.sharing else self.shard
        first, last = (min(max(each - start, 0), elements) for each in (shard.start, shard.stop))
        return range(first, last)

    def place_in_shard(self, name: str) -> int:
        """Where in this rank's shard the elements of a weight begin that it steps."""
        return max(0, self.bucket.starts[self.bucket.names.index(name)] - self.shard.start)

    def joined_view(self, parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return a view [N, ...] of N parameters, the last one first; None unless they lie one after another and are alike."""
        first, starts = parameters[-1], [self._starts.get(each) for each in parameters[::-1]]
        if starts[0] is None or any(each.shape != first.shape for each in parameters):
            return None
        end = starts[0] + len(parameters) * first.numel()
        if starts != list(range(starts[0], end, first.numel())):
            return None
        return self.weights[starts[0] : end].view(len(parameters), *first.shape)

    def take_place(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return where a parameter's gradient that has come belongs, and whether it is added there to those before."""
        if self.gradients is None:
            self._allocate()
        has_come = parameter in self._filled
        self._filled.add(parameter)
        return self._held[parameter], has_come

    def empty(self) -> None:
        """Forget the gradients of the step before."""
        self._filled.clear()
        self.fills += 1
        self._summed = None
        if self.in_place:
            if self.gradients is None:  # all others are under way
                self._allocate()
            assert self.gradients is not None
            self.gradients.zero_()
            for parameter, held in self._held.items():
                parameter.grad = held

    def reduce(self) -> None:
        """Begin to sum the gradients that have arrived over the data axis."""
        if self.gradients is None:
            self._allocate()
        assert self.gradients is not None
        for parameter, held in () if self.in_place else self._held.items():
            if parameter not in self._filled:  # no loss depends on it
                held.zero_()
        self.wait()
        if self.sharing is None:
            if self.servers:
                self._work = self.servers.push(self.gradients)
            elif self.rounds and self.rounds.is_on:
                self._work = self.rounds.begin()
            elif self.copies:
                self._work = dist.all_reduce(self.gradients, group=self.copies.handle, async_op=True)
            return
        self._scattered = self.gradients.new_empty(len(self.shard))
        self._work = dist.reduce_scatter_tensor(self._scattered, self.gradients, group=self.sharing.handle, async_op=True)
        if self.often:
            self._sent, self.gradients, self._held = self.gradients, None, {}
            self._filled.clear()
            self.fills += 1

    def wait(self) -> None:
        """Wait for a sum under way."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._scattered is None:
            return
        if self.often and self._summed is not None:
            self._summed += self._scattered
        else:
            self._summed = self._scattered
        self._scattered = self._sent = None

    def set_sum_aside(self) -> SumUnderWay:
        """Return the gradients whose sum is under way; the next ones get other memory."""
        aside = SumUnderWay(self.gradients, self._held, self._scattered, self._work)
        self.gradients, self._held, self._scattered, self._work = None, {}, None, None
        self.fills += 1
        return aside

    def take_sum_back(self, aside: SumUnderWay) -> None:
        """Take the gradients that were set aside as those of the step to come; their memory is used again after it."""
        self.gradients, self._held, self._scattered, self._work = aside
        self.fills += 1

    def sum_copies(self) -> None:
        """Begin to sum the shard over the ranks that own the same one, after the last reduce-scatter of a step; where a sum takes several
        messages, begin the second."""
        if self.rounds and self.rounds.is_on:
            self._work = self.rounds.go_on()
        if self.sharing and self.copies:
            self._work = dist.all_reduce(self.shard_gradient, group=self.copies.handle, async_op=True)

    def complete_sum(self) -> None:
        """Make gradients whole whose sum takes several messages."""
        if self.rounds and self.rounds.is_on:
            self._work = self.rounds.complete()

    def own_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's gradient of a parameter of a late bucket, flat, which other axes sum before the data axis does."""
        held = self._held[parameter]
        if not self.in_place and parameter not in self._filled:
            held.zero_()
            self._filled.add(parameter)
        return held.view(-1)

    @property
    def is_unsummed(self) -> bool:
        """Whether no sum of this step's gradients has begun."""
        return self._summed is None and self._work is None

    @property
    def shard_gradient(self) -> Tensor:
        """This rank's shard of the global batch's gradients, once they are summed."""
        if self._summed is not None:
            return self._summed
        assert self.gradients is not None
        return self.gradients[self.shard.start : self.shard.stop] if self.servers else self.gradients

    @property
    def own_weights(self) -> Tensor:
        """This rank's shard of the weights that forward uses."""
        return self.weights[self.shard.start : self.shard.stop]

    @property
    def compute_copy(self) -> Tensor | None:
        """This rank's shard of the weights that forward uses; None where they are the float32 weights that are stepped."""
        return self.own_weights if self.on_host or self.weights.dtype != MASTER_DTYPE else None

    def copy_master(self) -> None:
        """Give the stepped float32 weights to the flat tensor that forward uses, as wide as that is."""
        if (own := self.compute_copy) is not None:
            own.copy_(self.master.data)

    def move_weights(self, into: Tensor | None) -> None:
        """Copy the flat weights to other memory, which is stepped from now on; parameters stay views of the memory before."""
        is_stepped = self.weights.dtype == MASTER_DTYPE  # where it is, without a float32 copy
        self.weights = torch.empty_like(self.weights).copy_(self.weights) if into is None else into.copy_(self.weights)
        if is_stepped:
            self.master.data = self.weights[self.shard.start : self.shard.stop]

    def point_parameters_at(self, flat: Tensor) -> None:
        """Make the parameters views of a flat tensor."""
        for parameter, view in self._views(flat):
            parameter.data = view

    def gather(self) -> Any:
        """Begin to gather the other ranks' stepped weights; return the message under way, or None where this rank has all."""
        if self.servers:
            return self.servers.pull(self.weights)
        if self.sharing is None:
            return None
        return dist.all_gather_into_tensor(self.weights, self.own_weights, group=self.sharing.handle, async_op=True)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) of all that the bucket holds."""
        yield "weights", self.weights
        yield "host" if self.on_host else "optimizer", self.master.data
        under_way = self._scattered if self.often and self._summed is None else None  # the first sum of a step, which nothing else holds
        for each in (self.gradients, self._summed, under_way):
            if each is not None:
                yield "gradients", each
        for each in self.rounds.held_tensors() if self.rounds else ():
            yield "buffers", each
        for each in received_tensors(self._work):
            yield "buffers", each

    def _allocate(self) -> None:
        self.gradients = torch.zeros(self.bucket.elements, dtype=self._gradient_type, device=self.weights.device)
        self._held = dict(self._views(self.gradients))

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with the part of a flat tensor that is its own, in its shape."""
        for parameter, start in self._starts.items():
            yield parameter, flat[start : start + parameter.numel()].view(parameter.shape)


def take_stepped_weights(buckets: Iterable[object]) -> None:
    """Give each bucket's stepped weights to those that forward uses, and gather the other ranks'; all ranks call this together."""
    for bucket in buckets:
        if isinstance(bucket, WeightBucket):
            bucket.copy_master()
            if (message := bucket.gather()) is not None:
                message.wait()
