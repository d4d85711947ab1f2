"""Two ranks that send messages of every kind with a ledger open.

Run by path. Prints a line of JSON: {kind of message: rows of the ledger}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from distrain.tests.rank_programs.tensor_ranks import main
from distrain.trainer.layers.rank_group import Group
from distrain.trainer.parallel.ledger import Ledger
from distrain.trainer.parallel.process_groups import Grid
from distrain.trainer.parallel.world import World
from distrain.trainer.plan.layout.mesh import Mesh
from distrain.trainer.plan.mesh_position import MeshPosition

all_reduce_before = dist.all_reduce  # a reference that was taken before any ledger was open


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        all_reduce_before(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SumOverRanks.forward(ctx, grad)


def ledger_rows(group: Group) -> dict[str, list[tuple[str, str, int, int]]]:
    """Return the ledger's rows of each kind of message. Tensors have 100 float32 elements, except where the code says otherwise."""
    x, both, half = torch.ones(100), torch.empty(200), torch.empty(50)
    other, first, handle = 1 - group.rank, group.rank == 0, group.handle
    weight = torch.ones(100, requires_grad=True)
    alone = dist.new_group([0]), dist.new_group([1])
    elsewhere = dist.new_group([0, 1])
    kinds: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=handle),
        "all_reduce under way": lambda: wait(dist.all_reduce(x, group=handle, async_op=True)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(both, x, group=handle),
        "all_gather": lambda: dist.all_gather(list(both.chunk(2)), x, group=handle),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, x, group=handle),
        "reduce_scatter": lambda: dist.reduce_scatter(half, list(x.chunk(2)), group=handle),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(100), x, group=handle),
        "broadcast": lambda: dist.broadcast(x, 0, group=handle),
        "barrier": lambda: dist.barrier(),
        "send and receive": lambda: dist.send(x, 1) if first else dist.recv(x, 0),
        "isend and irecv": lambda: wait(dist.isend(x, 1) if first else dist.irecv(x, 0)),
        "batch_isend_irecv": lambda: exchange(x, other),
        "objects": lambda: dist.all_gather_object([None, None], {"a": 1}),
        "a float": lambda: dist.all_reduce(torch.ones(())),
        "losses": lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64), group=elsewhere),
        "few gradients": lambda: dist.all_reduce(torch.ones(4), group=elsewhere),
        "figures of a step": lambda: dist.all_reduce(torch.ones(100, dtype=torch.float64)),
        "gradients in float64": lambda: dist.all_reduce(torch.ones(100, dtype=torch.float64), group=elsewhere),
        "one rank": lambda: dist.all_reduce(x, group=alone[group.rank]),
        "another group of the same ranks": lambda: dist.all_reduce(x, group=elsewhere),
        "backward": lambda: SumOverRanks.apply(weight).sum().backward(),
        "recomputation": lambda: checkpoint(summed_sine, weight, use_reentrant=False).sum().backward(),
    }
    rows = {}
    for kind, send in kinds.items():
        with Ledger(two_rank_grid(group)) as ledger:
            send()
        send()  # after the ledger is closed: not counted
        rows[kind] = [(row.axis, row.verb, row.payload, row.count) for row in ledger.rows]
    return rows


def wait(work: dist.Work | None) -> None:
    """Wait for a message that was started."""
    assert work is not None
    work.wait()


def exchange(x: Tensor, other: int) -> None:
    """Send a tensor to the other rank and receive one, in a batch."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(100), other)]):
        work.wait()


def summed_sine(x: Tensor) -> Tensor:
    """Return the sine of a sum over the ranks."""
    summed: Tensor = SumOverRanks.apply(x * 2)
    return summed.sin()


def two_rank_grid(group: Group) -> Grid:
    """Return the grid of two tensor-parallel ranks."""
    mesh = Mesh(tp=2)
    position = MeshPosition(rank=group.rank, mesh=mesh, coordinates=mesh.coordinates(group.rank), parts=())
    world = World(rank=group.rank, size=2, device=torch.device("cpu"))
    return Grid(world=world, position=position, groups={"tp": group}, alone=group.handle)


if __name__ == "__main__":
    raise SystemExit(main(2, ledger_rows, others=0))
