"""Where DeepSpeed ZeRO keeps this rank's part of each parameter's float32 weight, optimizer states and gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...plan.weight_slices import Placed

KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # what torch's optimizers keep for each element


class Holding(NamedTuple):
    """A parameter of this rank by its logical name, and what it holds of that; `tied`: its own stage is another."""

    name: str
    parameter: nn.Parameter
    placed: Placed
    tied: bool

    @property
    def counted(self) -> bool:
        """Whether this rank, of those of one replica that hold the same, counts it."""
        return self.placed.copy == 0 and not self.tied


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Of a parameter laid out flat, `length` elements from `start`: the float32 tensor that is stepped and the optimizer's
    state, which is that of a tensor in which these elements begin at `at`. `alone`: no other data-parallel rank steps them."""

    placed: Placed
    tied: bool
    start: int
    length: int
    weight: Tensor
    state: dict[str, Any]
    at: int
    alone: bool

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, flat view) of each state."""
        for kind in KINDS:
            held = self.state.get(kind)
            if isinstance(held, Tensor):
                yield kind, held.view(-1).narrow(0, self.at, self.length)


def partitions(holdings: Sequence[Holding], stepper: Any, stage: int) -> Iterator[Partition]:
    """What this rank steps: at stage 0 all that it holds, else its run of each parameter."""
    rows = [each for each in holdings if each.parameter.requires_grad]
    match stage:
        case 0:
            yield from (whole(each, stepper) for each in rows)
        case 3:
            yield from _gathered(rows, stepper)
        case _:
            yield from _flat(rows, stepper)


def whole(each: Holding, stepper: Any) -> Partition:
    """All of a parameter that is stepped as it is."""
    flat = each.parameter.data.view(-1)
    state = _state(stepper, each.parameter)
    return Partition(placed=each.placed, tied=each.tied, start=0, length=flat.numel(), weight=flat, state=state, at=0, alone=False)


def _flat(rows: Sequence[Holding], stepper: Any) -> Iterator[Partition]:
    """Stages 1 and 2: each group of parameters is one flat tensor, of which each rank has a run."""
    groups = getattr(stepper, "fp32_groups_flat_partition", None) or stepper.single_partition_of_fp32_groups
    for each in rows:
        held: Any = getattr(each.parameter, "_hp_mapping", None)
        if held is None:
            continue
        here, there = held.lp_fragment_address, held.hp_fragment_address
        yield Partition(
            placed=each.placed,
            tied=each.tied,
            start=here.start,
            length=here.numel,
            weight=held.hp_fragment.data.view(-1),
            state=_state(stepper.optimizer, groups[held.param_group_index]),
            at=there.start,
            alone=True,
        )


def _gathered(rows: Sequence[Holding], stepper: Any) -> Iterator[Partition]:
    """Stage 3: each rank has an equal run of each parameter, the last of them padded."""
    from deepspeed.utils import safe_get_local_fp32_param

    for each in rows:
        start, length = share(each.parameter)
        if not length:
            continue
        group, offset, _ = stepper.grad_position[stepper.get_param_id(each.parameter)]
        yield Partition(
            placed=each.placed,
            tied=each.tied,
            start=start,
            length=length,
            weight=safe_get_local_fp32_param(each.parameter).detach().view(-1)[:length],
            state=_state(stepper.optimizer, stepper.fp32_partitioned_groups_flat[group]),
            at=offset,
            alone=True,
        )


def share(parameter: nn.Parameter) -> tuple[int, int]:
    """(first flat element, elements) of this rank's run of a parameter at stage 3."""
    held: Any = parameter
    each = held.ds_tensor.ds_numel
    start = min(dist.get_rank(held.ds_process_group) * each, held.ds_numel)
    return start, min(each, held.ds_numel - start)


def gradients(rows: Sequence[Holding], stepper: Any, stage: int) -> Iterator[Tensor]:
    """The gradients, averaged over the data axis, of what this rank steps, after the last backward and before the step: they may
    be written. bf16 with float32 gradients at stage 1 keeps all of each."""
    if stage == 3:
        wanted = {id(each.parameter) for each in rows}
        for index, parameters in enumerate(stepper.fp16_groups):
            for parameter, gradient in zip(parameters, stepper.averaged_gradients[index], strict=True):
                if id(parameter) in wanted:
                    yield gradient
        return
    for each in rows:
        held: Any = each.parameter
        if stage == 0:
            yield held.grad
        elif getattr(held, "_hp_grad", None) is not None:
            yield held._hp_grad
        elif getattr(held, "_hp_mapping", None) is not None:
            yield held._hp_mapping.get_lp_grad_fragment(held._index_in_param_group)


def _state(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Any]:
    """The optimizer's state of a tensor; made as the optimizer would, where it has not stepped yet."""
    state: dict[str, Any] = optimizer.state[stepped]
    if not state and isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), device=stepped.device if stepped.is_cuda else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(stepped), torch.zeros_like(stepped)
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(stepped)
    return state
