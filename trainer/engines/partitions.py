"""Where DeepSpeed ZeRO keeps this rank's part of each parameter's float32 weight and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # what torch's optimizers keep for each element


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Of a parameter laid out flat, `length` elements from `start`: the float32 tensor that is stepped and the optimizer's
    state, which is that of a tensor in which these elements begin at `at`."""

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    weight: Tensor
    state: dict[str, Any]
    at: int

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, flat view) of each state."""
        for kind in KINDS:
            held = self.state.get(kind)
            if isinstance(held, Tensor):
                yield kind, held.view(-1).narrow(0, self.at, self.length)


def partitions(module: nn.Module, stepper: Any, stage: int) -> Iterator[Partition]:
    """This rank's partitions, each element of each parameter on exactly one rank."""
    names = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    match stage:
        case 0:
            yield from _replicated(names, stepper)
        case 3:
            yield from _gathered(names, stepper)
        case _:
            yield from _flat(names, stepper)


def _replicated(names: list[tuple[str, nn.Parameter]], stepper: Any) -> Iterator[Partition]:
    """Every rank has everything: the ranks take turns at owning."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for index, (name, parameter) in enumerate(names):
        if index % size == rank:
            yield whole(name, parameter, stepper)


def whole(name: str, parameter: nn.Parameter, stepper: Any) -> Partition:
    """All of a parameter that is stepped as it is."""
    flat = parameter.data.view(-1)
    state = _state(stepper, parameter)
    return Partition(name=name, shape=tuple(parameter.shape), start=0, length=flat.numel(), weight=flat, state=state, at=0)


def _flat(names: list[tuple[str, nn.Parameter]], stepper: Any) -> Iterator[Partition]:
    """Stages 1 and 2: each group of parameters is one flat tensor, of which each rank has a run."""
    groups = getattr(stepper, "fp32_groups_flat_partition", None) or stepper.single_partition_of_fp32_groups
    for name, parameter in names:
        held: Any = getattr(parameter, "_hp_mapping", None)
        if held is None:
            continue
        here, there = held.lp_fragment_address, held.hp_fragment_address
        yield Partition(
            name=name,
            shape=tuple(parameter.shape),
            start=here.start,
            length=here.numel,
            weight=held.hp_fragment.data.view(-1),
            state=_state(stepper.optimizer, groups[held.param_group_index]),
            at=there.start,
        )


def _gathered(names: list[tuple[str, nn.Parameter]], stepper: Any) -> Iterator[Partition]:
    """Stage 3: each rank has an equal run of each parameter, the last of them padded."""
    from deepspeed.utils import safe_get_local_fp32_param

    for name, parameter in names:
        shape, start, length = share(parameter)
        if not length:
            continue
        group, offset, _ = stepper.grad_position[stepper.get_param_id(parameter)]
        yield Partition(
            name=name,
            shape=shape,
            start=start,
            length=length,
            weight=safe_get_local_fp32_param(parameter).detach().view(-1)[:length],
            state=_state(stepper.optimizer, stepper.fp32_partitioned_groups_flat[group]),
            at=offset,
        )


def share(parameter: nn.Parameter) -> tuple[tuple[int, ...], int, int]:
    """(whole shape, first flat element, elements) of this rank's run of a parameter at stage 3."""
    held: Any = parameter
    each = held.ds_tensor.ds_numel
    start = min(dist.get_rank() * each, held.ds_numel)
    return tuple(held.ds_shape), start, min(each, held.ds_numel - start)


def _state(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Any]:
    """The optimizer's state of a tensor; made as the optimizer would, where it has not stepped yet."""
    state: dict[str, Any] = optimizer.state[stepped]
    if not state and isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), device=stepped.device if stepped.is_cuda else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(stepped), torch.zeros_like(stepped)
    return state
