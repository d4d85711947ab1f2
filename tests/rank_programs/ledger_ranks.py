"""Two ranks that send messages of every kind with a ledger open. Run by path: a line of JSON on stdout, {what: rows of the ledger}."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from tensor_ranks import main  # type: ignore[import-not-found]

from distrain.trainer.layers.group import Group
from distrain.trainer.parallel.ledger import Ledger
from distrain.trainer.parallel.process_groups import Grid
from distrain.trainer.parallel.world import World
from distrain.trainer.plan.mesh import Mesh
from distrain.trainer.plan.mesh_position import MeshPosition

early = dist.all_reduce  # a function that somebody holds since before a ledger was open


class Summed(torch.autograd.Function):
    """A sum over the ranks in forward, and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        early(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Summed.forward(ctx, grad)


def sent(group: Group) -> dict[str, list[tuple[str, str, int, int]]]:
    """What a ledger has written down of each kind of message; 100 float32 a tensor, but where it says otherwise."""
    x, both, half = torch.ones(100), torch.empty(200), torch.empty(50)
    other, first, handle = 1 - group.rank, group.rank == 0, group.handle
    weight = torch.ones(100, requires_grad=True)
    alone = dist.new_group([0]), dist.new_group([1])
    elsewhere = dist.new_group([0, 1])
    kinds: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=handle),
        "all_reduce under way": lambda: waited(dist.all_reduce(x, group=handle, async_op=True)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(both, x, group=handle),
        "all_gather": lambda: dist.all_gather(list(both.chunk(2)), x, group=handle),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, x, group=handle),
        "reduce_scatter": lambda: dist.reduce_scatter(half, list(x.chunk(2)), group=handle),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(100), x, group=handle),
        "broadcast": lambda: dist.broadcast(x, 0, group=handle),
        "barrier": lambda: dist.barrier(),
        "send and receive": lambda: dist.send(x, 1) if first else dist.recv(x, 0),
        "isend and irecv": lambda: waited(dist.isend(x, 1) if first else dist.irecv(x, 0)),
        "batch_isend_irecv": lambda: exchanged(x, other),
        "objects": lambda: dist.all_gather_object([None, None], {"a": 1}),
        "a float": lambda: dist.all_reduce(torch.ones(())),
        "one rank": lambda: dist.all_reduce(x, group=alone[group.rank]),
        "another group of the same ranks": lambda: dist.all_reduce(x, group=elsewhere),
        "backward": lambda: Summed.apply(weight).sum().backward(),
        "recomputation": lambda: checkpoint(recomputed, weight, use_reentrant=False).sum().backward(),
    }
    found = {}
    for what, act in kinds.items():
        with Ledger(alike(group)) as ledger:
            act()
        act()  # is not counted
        found[what] = [(row.axis, row.verb, row.payload, row.count) for row in ledger.rows]
    return found


def waited(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def exchanged(x: Tensor, other: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(100), other)]):
        work.wait()


def recomputed(x: Tensor) -> Tensor:
    made: Tensor = Summed.apply(x * 2)
    return made.sin()


def alike(group: Group) -> Grid:
    """A grid of two tensor-parallel ranks, of which one axis is known."""
    mesh = Mesh(tp=2)
    seat = MeshPosition(rank=group.rank, mesh=mesh, coordinates=mesh.coordinates(group.rank), parts=())
    world = World(rank=group.rank, size=2, device=torch.device("cpu"))
    return Grid(world=world, position=seat, groups={"tp": group}, alone=group.handle)


if __name__ == "__main__":
    raise SystemExit(main(2, sent))
