"""Ranks that hold our compression of gradients to PyTorch's powerSGD_hook, on the same gradients; run by path, prints a line of JSON.

{fact: the largest difference on any rank, as a share of the largest gradient}
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distrain.tests.rank_programs.forked_ranks import fork_ranks
from distrain.trainer.engines.native.data_parallel.gradient_compression import BucketCompression
from distrain.trainer.layers.rank_group import Group
from distrain.trainer.plan.axes.weight_slices import WeightShard

RANKS, RANK, SEED = 3, 2, 5
STEPS, WHOLE = 8, 2  # steps in all, and those before the hook compresses: it needs two
SHAPES = ((24, 16), (10, 40), (24, 16), (31, 7))
SIZES = [rows * columns for rows, columns in SHAPES]
STARTS, ELEMENTS = [0, *accumulate(SIZES[:-1])], sum(SIZES)


class GradientBucket:
    """What the hook asks of DDP's bucket: the gradients of the weights, in their order."""

    def __init__(self, given: list[Tensor]) -> None:
        self._flat = torch.cat([each.flatten() for each in given])

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(torch.split(self._flat, SIZES), SHAPES, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def gradients(step: int, rank: int) -> list[Tensor]:
    """Gradients of one rank and step: what all share, and noise of its own."""
    drawn = []
    for at, shape in enumerate(SHAPES):
        shared = torch.randn(shape, generator=torch.Generator().manual_seed(at))
        drawn.append(shared + torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + at)))
    return drawn


def shard(at: int) -> WeightShard:
    """One of the weights, which no axis splits."""
    shape = SHAPES[at]
    return WeightShard(name=f"weight {at}", shape=shape, offset=(0, 0), length=shape, size=shape, copy=0, copies=1, shared=False)


def compression(flat: Tensor, rank: int) -> BucketCompression:
    """Our compression of the weights, one after another in a flat tensor."""
    assert dist.group.WORLD is not None
    group = Group(name="data", ranks=tuple(range(RANKS)), rank=rank, handle=dist.group.WORLD)
    return BucketCompression([shard(at) for at in range(len(SHAPES))], STARTS, flat, RANK, SEED, group)


def compressed_sum(ours: BucketCompression, flat: Tensor, given: list[Tensor]) -> Tensor:
    """Sum the gradients of a step by our compression; each rank has its part of the mean."""
    flat.copy_(torch.cat([each.flatten() for each in given]) / RANKS)
    ours.begin().wait()
    ours.go_on().wait()
    ours.complete()
    return flat


def first_factors() -> list[Tensor]:
    """The right factors that the hook begins with, before it makes them orthogonal: it draws those of equal weights as one tensor."""
    torch.manual_seed(np.random.RandomState(SEED).randint(1_000_000_000))
    drawn = {shape: list(torch.randn(SHAPES.count(shape), shape[1], RANK)) for shape in dict.fromkeys(SHAPES)}
    return [drawn[shape].pop(0) for shape in SHAPES]


def hook_differences(rank: int) -> dict[str, float]:
    """Sum the gradients of some steps with the hook and with ours, from the hook's first factors."""
    state = PowerSGDState(
        None, RANK, start_powerSGD_iter=WHOLE, min_compression_rate=1, random_seed=SEED, batch_tensors_with_same_shape=True
    )
    flat = torch.zeros(ELEMENTS)
    ours = compression(flat, rank)
    for each, drawn in zip(sorted(ours.weights, key=lambda each: each.start), first_factors(), strict=True):
        each.right.copy_(drawn)
    largest = dict.fromkeys(("gradients", "errors"), 0.0)
    for step in range(STEPS):
        given = gradients(step, rank)
        theirs = powerSGD_hook(state, cast(Any, GradientBucket(given))).wait()
        if step >= WHOLE:
            compressed_sum(ours, flat, given)
            largest["gradients"] = max(largest["gradients"], distance(flat, theirs))
            largest["errors"] = max(largest["errors"], distance(ours.errors, state.error_dict[0]))
    return largest


def shared_errors(rank: int) -> dict[str, float]:
    """What ranks do with the mean of all errors is what they do with their own."""
    found = []
    for is_shared in (False, True):
        flat = torch.zeros(ELEMENTS)
        ours = compression(flat, rank)
        for step in range(4):
            compressed_sum(ours, flat, gradients(step, rank))
            if is_shared and step == 1:
                ours.share_errors()
            elif step == 1:
                ours.restart()
        found.append(flat.clone())
    return {"errors shared": distance(*found)}


def forgotten_step(rank: int) -> dict[str, float]:
    """After a step whose gradients are not finite, compression begins anew."""
    flat, fresh = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    ours = compression(flat, rank)
    compressed_sum(ours, flat, gradients(0, rank))
    spoiled = compressed_sum(ours, flat, [each * (float("nan") if rank else 1.0) for each in gradients(1, rank)])
    is_seen = bool(spoiled.isnan().any())
    ours.forget()
    new = compression(fresh, rank)
    after = distance(compressed_sum(ours, flat, gradients(2, rank)), compressed_sum(new, fresh, gradients(2, rank)))
    return {"forgotten": after if is_seen else float("inf")}


def returning_gradient(rank: int) -> dict[str, float]:
    """A weight without a gradient in the first step, such as LoRA's A beside a B of zeros, has one in the second."""
    flat, fresh = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    ours, new = compression(flat, rank), compression(fresh, rank)
    compressed_sum(ours, flat, [torch.zeros_like(each) for each in gradients(0, rank)])
    return {"zero stays": distance(compressed_sum(ours, flat, gradients(1, rank)), compressed_sum(new, fresh, gradients(1, rank)))}


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def run_rank(rank: int) -> None:
    found = hook_differences(rank) | shared_errors(rank) | forgotten_step(rank) | returning_gradient(rank)
    every: list[dict[str, float]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(every, found)
    if rank == 0:
        print(json.dumps({fact: max(each[fact] for each in every) for fact in found}), flush=True)


if __name__ == "__main__":
    sys.exit(fork_ranks(RANKS, run_rank))
