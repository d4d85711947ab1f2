"""Parameter servers among the data-parallel ranks: they sum the gradients of all, step the weights, and send them (parallel.reduce=server;
Li et al. 2014, https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....layers.rank_group import Group
from ....plan.layout.gradient_routes import server_ranks
from ....plan.native.buckets import Bucket

Transfer = tuple[Callable[..., Any], Tensor, int]  # isend or irecv, what, the other rank's number in the group


class ParameterServers:
    """The servers of a group of ranks, each of which owns an equal part of every bucket. A server computes gradients as all
    other ranks do."""

    def __init__(self, group: Group, servers: int, *, keeps_all: bool) -> None:
        """`keeps_all`: gradients of several buckets are under way at once; else those of one, so that a server has few of them."""
        self.group = group
        self._keeps_all, self._pushed = keeps_all, ServerMessages(group, [], torch.empty(0), [])
        self._servers = server_ranks(servers, group.size)
        self._number = self._servers.index(group.rank) if group.rank in self._servers else None

    def own(self, bucket: Bucket) -> range:
        """Return the elements of a bucket that this rank steps; none where it is no server."""
        return range(0) if self._number is None else bucket.shard(len(self._servers), self._number)

    def push(self, gradients: Tensor) -> ServerMessages:
        """Begin to send every server its part of a bucket's gradients [E]. Once it has waited for the others, a server adds theirs to its
        own part, in the order of the ranks, so that every run rounds alike."""
        if not self._keeps_all:
            self._pushed.wait()
        parts = gradients.chunk(len(self._servers))
        transfers: list[Transfer] = [(dist.isend, parts[at], rank) for at, rank in enumerate(self._servers) if rank != self.group.rank]
        received: list[Tensor] = []
        if self._number is not None:
            received = [torch.empty_like(parts[self._number]) for _ in range(self.group.size - 1)]
            transfers += [(dist.irecv, *each) for each in zip(received, self._others, strict=True)]
        self._pushed = ServerMessages(self.group, transfers, parts[self._number or 0], received)
        return self._pushed

    def pull(self, weights: Tensor) -> ServerMessages:
        """Begin to get a bucket's stepped weights [E], each part from its server."""
        transfers: list[Transfer] = []
        for at, (part, server) in enumerate(zip(weights.chunk(len(self._servers)), self._servers, strict=True)):
            if at == self._number:
                transfers += [(dist.isend, part, rank) for rank in self._others]
            else:
                transfers.append((dist.irecv, part, server))
        return ServerMessages(self.group, transfers, weights, [])

    @property
    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.group.size) if rank != self.group.rank)


class ServerMessages:
    """Messages to and from servers that are under way."""

    def __init__(self, group: Group, transfers: Sequence[Transfer], total: Tensor, added: Sequence[Tensor]) -> None:
        """Once all have arrived, those in `added` are added to `total`."""
        operations = [dist.P2POp(kind, part, group=group.handle, group_peer=peer) for kind, part, peer in transfers]
        self._works = dist.batch_isend_irecv(operations) if operations else []
        self._total, self.added = total, added

    def wait(self) -> None:
        """Wait for all of them, and add what has arrived."""
        for work in self._works:
            work.wait()
        for each in self.added:
            self._total += each
        self._works, self.added = [], ()
