"""PyTorch's fully_shard (FSDP2), which gathers a layer's weights around its forward and its backward. Its import takes a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .host_rows import keep_rows_on_host
from .shard_groups import RowGroups, ShardGroups
from .sharded_weights import local_rows
from .weight_buckets import MASTER_DTYPE


def shard_modules(
    modules: Sequence[nn.Module], groups: RowGroups, types: tuple[torch.dtype, torch.dtype], device: torch.device, *, on_host: bool
) -> None:
    """Shard the parameters of modules, which `keep_own_rows` made, by rows: each layer alone, and each module that predicts a further
    token, their experts apart, embedding and head together.

    They are gathered in the first of two `types`; gradients are summed in the second, and kept in float32 whatever the rows' type is, or
    where the rows stay in the host's memory (`on_host`), taken there in the second.
    """
    for module in modules:
        _shard_module(module, groups, *types, device, on_host=on_host)
        module.compute_type = types[0]  # type: ignore[assignment]


def _shard_module(
    module: nn.Module, groups: RowGroups, compute: torch.dtype, reduced: torch.dtype, device: torch.device, *, on_host: bool
) -> None:
    own: dict[str, Any] = {name: getattr(parameter, "own_rows", None) for name, parameter in module.named_parameters()}
    mesh = _device_mesh(groups[False], device.type)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced, cast_forward_inputs=False)
    layers: Any = module.layers
    modules: Any = getattr(module, "mtp", {})
    for unit, layer in (*((each, each) for each in layers.values()), *((each, each.layer) for each in modules.values())):
        for part in _expert_parts(layer):
            fully_shard(part, mesh=_device_mesh(groups[True], device.type), mp_policy=policy)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    if on_host:
        rows = {parameter: own[name] for name, parameter in module.named_parameters()}
        states = [fully_shard.state(each) for each in module.modules() if isinstance(each, FSDPModule)]  # type: ignore[attr-defined]
        keep_rows_on_host(_groups_of(states), rows, device)
    else:
        module.to_empty(device=device)
        for name, parameter in module.named_parameters():
            local_rows(parameter).copy_(own[name])
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)  # the loss is the global batch's mean already
            each.set_force_sum_reduction_for_comms(True)
    kept = reduced if on_host else MASTER_DTYPE
    if any(each.dtype != kept for each in module.parameters()):
        _keep_gradients_in(kept, module)


def _keep_gradients_in(dtype: torch.dtype, module: nn.Module) -> None:
    """Have fully_shard keep gradients in a type other than that of the rows that it gathers, to which it would cast each sum."""
    root: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    root._lazy_init()  # else the first forward does, which would read the rows' type again
    for group in _parameter_groups(root):
        group._orig_dtype = dtype
        for weight in group.fsdp_params:
            weight.sharded_grad_dtype = dtype  # since torch 2.15 of each weight
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype


def _parameter_groups(root: Any) -> Iterator[Any]:
    """Yield fully_shard's groups of parameters of a module, given its state."""
    return _groups_of(root._state_ctx.all_states)


def _groups_of(states: Iterable[Any]) -> Iterator[Any]:
    """Yield the groups of parameters of fully_shard's states of modules."""
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before it a state has one group at most
        yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


def _expert_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules inside of a layer, or group of layers, all of whose parameters are experts that ranks share out."""
    for part in module.children():
        parameters = list(part.parameters())
        if parameters and all(getattr(each, "is_expert", False) for each in parameters):
            yield part
        else:
            yield from _expert_parts(part)


def _device_mesh(groups: ShardGroups, device: str) -> DeviceMesh:
    """Return the mesh on which fully_shard shards over `sharing`, and sums over `copies` what it has scattered.

    Only the row and the column of this rank are read.
    """
    group, copies = groups.sharing, groups.copies
    assert group is not None
    if copies is None:
        return DeviceMesh.from_group(group.handle, device)
    ranks = torch.full((copies.size, group.size), -1)
    ranks[copies.rank], ranks[:, group.rank] = torch.tensor(group.ranks), torch.tensor(copies.ranks)
    return DeviceMesh.from_group([copies.handle, group.handle], device, mesh=ranks, mesh_dim_names=("copies", "shard"))


def sum_gradients(module: nn.Module, deferred: dict[nn.Parameter, Tensor]) -> None:
    """Sum a module's gradients over the ranks, those that backward computed and those of gathered weights in `deferred`, which it empties,
    and drop the gathered weights: as torch.distributed.pipelining does after a schedule's last action."""
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    root: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    for group in _parameter_groups(root):
        for weight in group.fsdp_params:
            if (gradient := deferred.pop(weight._unsharded_param, None)) is None:
                continue
            _add_gradient(weight, gradient)
        group.post_backward()
    root._root_post_backward_final_callback()


def _add_gradient(weight: Any, gradient: Tensor) -> None:
    """Add a gradient, of the type in which gradients are summed, to those of a weight of fully_shard that backward has computed. Before
    torch 2.15 it adds up those of several backwards apart from the gathered weight; since then they are the gathered weight's own."""
    if "unsharded_accumulated_grad" in vars(weight):
        held = weight.unsharded_accumulated_grad
        weight.unsharded_accumulated_grad = gradient if held is None else held.add_(gradient)
        return
    gathered = weight._unsharded_param
    total = gradient if gathered.grad is None else gradient.add_(gathered.grad)
    gathered.grad_dtype = total.dtype
    gathered.grad = total
