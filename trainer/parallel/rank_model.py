"""What a rank holds of the model: its parts as modules, with the slices of their weights that its seat says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..layers.context import Context
from ..layers.split_linear import Region
from ..models.build import fill, initial, module_of
from ..models.families import FAMILIES
from ..plan.mesh_position import Part
from ..plan.weight_slices import Heads, Placed
from ..spec.run import Run
from .process_groups import Grid


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model on this rank: its module, and what each of its parameters holds, by name.

    A parameter carries `tensor_model_parallel`, as DeepSpeed asks for the gradient norm: whether this rank counts it, each
    element of the model being counted by one rank of a replica. `tied`: names of copies whose own stage is another.
    """

    module: nn.Module
    held: dict[str, Placed]
    tied: tuple[str, ...] = ()


def region_of(run: Run, grid: Grid) -> Region | None:
    """The tensor axis as layers see it; None where it has one rank."""
    group = grid.group("tp")
    if group is None:
        return None
    heads = heads_of(run, group.size).query(group.rank)
    return Region(group=group, sequence=run.parallel.sequence, first_head=heads.offset, no_heads=heads.size - heads.length)


def context_of(grid: Grid) -> Context | None:
    """The context axis as layers see it; None where it has one rank."""
    group = grid.group("cp")
    return None if group is None else Context(group=group)


def heads_of(run: Run, degree: int) -> Heads:
    """How a model's heads lie on the ranks of the tensor axis."""
    size = FAMILIES[run.model.family](run.model, run.train).sizes
    return Heads(size["heads"], size["kv_heads"], degree)


def stage(
    run: Run,
    grid: Grid,
    part: Part,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None = None,
    made_one: Callable[[nn.Parameter], object] | None = None,
) -> Stage:
    """A part of the model with initial values drawn from a seed; without one its weights are there to be filled.

    `made_one` is told of each parameter before the next is made: it may let go of what other ranks keep.
    """
    if run.model.family == "hf":
        return _foreign(run, device=device, dtype=dtype, seed=seed)
    held = {each.name: each for each in grid.seat.holds(run, part)}
    tied = ("embedding.weight",) if run.model.tied and part.last and not part.first else ()
    made: dict[str, nn.Parameter] = {}
    for name, placed in held.items():
        tensor = torch.empty(placed.size, device=device, dtype=dtype)
        if seed is not None and device.type != "meta":
            first = initial(name, placed.shape, placed.offset, placed.length, layers=run.model.layers, seed=seed, device=device)
            fill(tensor, first)
        made[name] = counted(nn.Parameter(tensor), placed, tied=name in tied)
        del tensor
        if made_one is not None:
            made_one(made[name])
    region, context, experts = region_of(run, grid), context_of(grid), grid.group("ep")
    module = module_of(made, run, region, context=context, experts=experts, layers=part.layers, first=part.first, last=part.last)
    return Stage(module=module, held=held, tied=tied)


def counted(parameter: nn.Parameter, placed: Placed, *, tied: bool) -> nn.Parameter:
    """Mark whether this rank counts it in the gradient norm."""
    parameter.tensor_model_parallel = placed.copy == 0 and not tied  # type: ignore[attr-defined]
    parameter.ds_pipe_replicated = tied  # type: ignore[attr-defined]
    return parameter


def _foreign(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None) -> Stage:
    """transformers' own model, whole on every rank. Raises Unreadable."""
    from ..models.auto.module import causal

    module = causal(run, device=device, dtype=dtype, seed=seed)
    return Stage(module=module, held={name: _whole(name, tuple(each.shape)) for name, each in module.named_parameters()})


def _whole(name: str, shape: tuple[int, ...]) -> Placed:
    zeros = (0,) * len(shape)
    return Placed(name=name, shape=shape, offset=zeros, length=shape, size=shape, copy=0, copies=1, shared=False)
