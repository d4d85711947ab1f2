"""Where DeepSpeed ZeRO keeps this rank's part of each parameter's float32 weight, optimizer states and gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..rank_parameter import OptimizerShard, RankParameter, optimizer_state, whole_parameter


def zero_shards(parameters: Sequence[RankParameter], stepper: Any, stage: int) -> Iterator[OptimizerShard]:
    """Yield what this rank steps: at ZeRO 0 all of each parameter, else its range of it."""
    rows = [each for each in parameters if each.parameter.requires_grad]
    match stage:
        case 0:
            yield from (whole_parameter(each, stepper) for each in rows)
        case 3:
            yield from _stage3_shards(rows, stepper)
        case _:
            yield from _flat_shards(rows, stepper)


def _flat_shards(rows: Sequence[RankParameter], stepper: Any) -> Iterator[OptimizerShard]:
    """ZeRO 1 and 2: each group of parameters is one flat tensor, of which each rank steps a range."""
    groups = getattr(stepper, "fp32_groups_flat_partition", None) or stepper.single_partition_of_fp32_groups
    for each in rows:
        mapping: Any = getattr(each.parameter, "_hp_mapping", None)
        if mapping is None:
            continue
        in_parameter, in_group = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield OptimizerShard(
            shard=each.shard,
            tied=each.tied,
            start=in_parameter.start,
            length=in_parameter.numel,
            weight=mapping.hp_fragment.data.view(-1),
            state=optimizer_state(stepper.optimizer, groups[mapping.param_group_index]),
            offset=in_group.start,
            copies=None,
        )


def _stage3_shards(rows: Sequence[RankParameter], stepper: Any) -> Iterator[OptimizerShard]:
    """Stage 3: each rank steps an equal range of each parameter, the last of them padded."""
    from deepspeed.utils import safe_get_local_fp32_param

    for each in rows:
        start, length = stage3_range(each.parameter)
        if not length:
            continue
        group, offset, _ = stepper.grad_position[stepper.get_param_id(each.parameter)]
        yield OptimizerShard(
            shard=each.shard,
            tied=each.tied,
            start=start,
            length=length,
            weight=safe_get_local_fp32_param(each.parameter).detach().view(-1)[:length],
            state=optimizer_state(stepper.optimizer, stepper.fp32_partitioned_groups_flat[group]),
            offset=offset,
            copies=None,
        )


def stage3_range(parameter: nn.Parameter) -> tuple[int, int]:
    """Return (first flat element, elements) of this rank's range of a parameter at ZeRO 3."""
    held: Any = parameter
    each = held.ds_tensor.ds_numel
    start = min(dist.get_rank(held.ds_process_group) * each, held.ds_numel)
    return start, min(each, held.ds_numel - start)


def averaged_gradients(rows: Sequence[RankParameter], stepper: Any, stage: int) -> Iterator[Tensor]:
    """Yield the gradients of what this rank steps, averaged over the data axis, between the last backward pass and the step.

    They may be written. bf16 with float32 gradients at ZeRO 1 keeps all of each.
    """
    if stage == 3:
        wanted = {id(each.parameter) for each in rows}
        for index, parameters in enumerate(stepper.fp16_groups):
            for parameter, gradient in zip(parameters, stepper.averaged_gradients[index], strict=True):
                if id(parameter) in wanted:
                    yield gradient
        return
    for each in rows:
        held: Any = each.parameter
        if not held.requires_grad:
            continue
        if stage == 0:
            yield held.grad
        elif getattr(held, "_hp_grad", None) is not None:
            yield held._hp_grad
        elif getattr(held, "_hp_mapping", None) is not None:
            yield held._hp_mapping.get_lp_grad_fragment(held._index_in_param_group)


def gradient_range(parameter: nn.Parameter, gradient: Tensor, stage: int) -> tuple[int, int]:
    """Return (first flat element, elements) of a parameter that one of its averaged gradients covers; ZeRO 3 pads the gradient."""
    held: Any = parameter
    if stage == 3:
        return stage3_range(parameter)
    if gradient.numel() == parameter.numel():
        return 0, parameter.numel()
    address = held._hp_mapping.lp_fragment_address
    return address.start, address.numel
