"""Ranks that compare a mixture of experts, split over expert and tensor ranks, with the unsplit model, in float64.

Run by path with layouts, EXPERT_RANKSxTENSOR_RANKS each. Prints a line of JSON for each: {layout: {fact: the largest difference on any
rank}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distrain.tests.rank_programs.forked_ranks import fork_ranks
from distrain.trainer.layers.counter_rng import DropoutKeys, dropout_keys, normal
from distrain.trainer.layers.cross_entropy import IGNORED
from distrain.trainer.layers.rank_group import Group, GroupName
from distrain.trainer.layers.tensor_parallel import TensorParallel
from distrain.trainer.models.build import build_model, build_module, named_constants, named_weights
from distrain.trainer.models.families import op_table
from distrain.trainer.models.moe.module import Experts
from distrain.trainer.models.ops.op_table import model_parameters
from distrain.trainer.plan.axes.weight_slices import HeadShards, WeightShard, weight_shard
from distrain.trainer.spec.run import Cluster, Device, Model, Parallel, Run, Train
from distrain.trainer.spec.sections.router import Router

B, S = 2, 16  # sequences of an expert rank, tokens of each
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"family": "moe", "layers": 2, "hidden": 12, "heads": 4, "vocab": 24, "ffn": 8, "experts": 4}
SHAPE |= {"norm": "rmsnorm", "act": "swiglu", "positions": "rope", "top_k": 2}
LATENT: dict[str, Any] = {"family": "mla", "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
HYBRID: dict[str, Any] = {"family": "hybrid", "layers": 4, "full_attention_interval": 2, "linear_num_key_heads": 4, "qk_norm": True}
HYBRID |= {"linear_num_value_heads": 8, "linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3}
HYBRID |= {"shared_experts": 1, "norm": "rmsnorm1p"}
MODELS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "balanced": {"aux_loss": 0.5, "shared_experts": 1, "experts": 8, "dense_layers": 1},  # several of a rank
    "limited capacity": {"aux_loss": 0.5, "capacity": 0.75, "dropout": 0.1},
    "groups and bias": {"aux_loss": 0.5, "experts": 8, "router": Router(score="sigmoid", scale=2.5, groups=4, top_groups=2, bias=True)},
    "biases and sinks": {"expert_bias": True, "sinks": True, "bias": True, "act": "swiglu_clamped", "window": 6, "aux_loss": 0.5},
    "latent": LATENT | {"q_lora_rank": 10},
    "hybrid": HYBRID | {"aux_loss": 0.5},
    "latent keys": LATENT | {"q_lora_rank": 0, "dropout": 0.1},
}


def run_of(model: str, ep: int, *, sequence: bool, recompute: str) -> Run:
    """Return a run of one of MODELS whose batch is B sequences a rank."""
    cluster = Cluster(nodes=1, gpus=1, device=Device(name="cpu", memory=1e12, kind="cpu"))
    train = Train(batch=B * ep, microbatch=B, seq=S, steps=1, precision="fp32")
    parallel = Parallel(sequence=sequence, recompute=recompute)  # type: ignore[arg-type]
    return Run(name="moe", model=Model(**SHAPE | MODELS[model]), cluster=cluster, parallel=parallel, train=train)


def unsplit_model(run: Run) -> nn.Module:
    """Return the whole model, with weights that all have an effect."""
    module = build_model(run, device=CPU, dtype=torch.float64, seed=5)
    with torch.no_grad():
        for name, tensor in named_weights(module, run):
            tensor.add_(0.3 * normal(6, name, 0, tensor.numel()).view(tensor.shape))
    return module


def split_model(run: Run, whole: nn.Module, experts: Group | None, tensor: Group | None) -> tuple[nn.Module, dict[str, WeightShard]]:
    """Return this rank's part of the model, and the shard of each weight."""
    table = op_table(run)
    ep, rank = (experts.size, experts.rank) if experts else (1, 0)
    tp, tensor_rank = (tensor.size, tensor.rank) if tensor else (1, 0)
    held = {
        each.name: weight_shard(each, table.sizes, tp, tensor_rank, ep=ep, expert_rank=rank)
        for each in model_parameters(table, range(run.model.layer_groups))
    }
    found = dict(whole.named_parameters())
    made = {name: nn.Parameter(weight_slice(found[name].detach(), each).clone()) for name, each in held.items()}
    heads = HeadShards(table.sizes["heads"], table.sizes["kv_heads"], tp).query_shard(tensor_rank)
    region = TensorParallel(group=tensor, sequence=run.parallel.sequence, first_head=heads.offset) if tensor else None
    constants = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in named_constants(whole)}
    return build_module(made | constants, run, region, ep=experts), held


def weight_slice(x: Tensor, by: WeightShard) -> Tensor:
    """Return the part of a weight that a shard has."""
    return x[tuple(slice(first, first + many) for first, many in zip(by.offset, by.length, strict=True))]


def batch_of(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens and labels of all ranks, some of them ignored, and the dropout states."""
    many = run.train.batch
    tokens, labels = torch.randint(run.model.vocab, (2, many, S), generator=torch.Generator().manual_seed(7))
    labels[0, 3:7] = labels[-1, -2:] = IGNORED
    return tokens, labels, dropout_keys(1, 0, torch.arange(many), torch.arange(S)).states


@cache
def unsplit_results(model: str, ep: int) -> tuple[nn.Module, Tensor, list[Tensor]]:
    """Return the whole model with its gradients, its loss, and the experts that tokens chose in each layer."""
    run = run_of(model, ep, sequence=False, recompute="none")
    whole = unsplit_model(run)
    return whole, *loss_and_choices(whole, *batch_of(run))


def facts(model: str, experts: Group | None, tensor: Group | None, *, sequence: bool, recompute: str) -> Iterator[tuple[str, float]]:
    """Yield (fact, difference) of what this rank computes of its sequences and what the whole model computes of all."""
    ep = experts.size if experts else 1
    run = run_of(model, ep, sequence=sequence, recompute=recompute)
    tokens, labels, states = batch_of(run)
    whole, expected, chose = unsplit_results(model, ep)
    part, held = split_model(run, whole, experts, tensor)
    mine = slice(B * experts.rank, B * experts.rank + B) if experts else slice(None)
    found, chosen = loss_and_choices(part, tokens[mine], labels[mine], states[mine])
    if experts:
        dist.all_reduce(found, group=experts.handle)
    yield "loss", float((found - expected).abs() / expected)
    yield "flips", float(sum((one != other[mine]).sum() for one, other in zip(chosen, chose, strict=True)))
    largest = max(float(grad(each).abs().max()) for each in whole.parameters())
    gradients = {name: grad(parameter) for name, parameter in part.named_parameters()}
    if experts:
        sum_together([made for name, made in gradients.items() if not held[name].expert], experts)
    if tensor and sequence:  # each rank has the part of its tokens; the engine sums the parts
        sum_together([made for name, made in gradients.items() if not held[name].is_split], tensor)
    for name, made in gradients.items():
        by = held[name]
        kind = next((each for each in ("router", "experts", "shared") if f".{each}." in name), "others")
        yield f"gradients of {kind}", float((made - weight_slice(grad(whole.get_parameter(name)), by)).abs().max()) / largest


def sum_together(tensors: Sequence[Tensor], group: Group) -> None:
    """Sum tensors over a group, in one message."""
    whole = torch.cat([each.flatten() for each in tensors])
    dist.all_reduce(whole, group=group.handle)
    for each, summed in zip(tensors, whole.split([each.numel() for each in tensors]), strict=True):
        each.copy_(summed.view_as(each))


def loss_and_choices(module: nn.Module, tokens: Tensor, labels: Tensor, states: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the losses, and the experts that tokens chose in each layer; leave gradients on the parameters."""
    chosen: list[Tensor] = []
    stacks = [each for each in module.modules() if isinstance(each, Experts)]
    hooks = [each.register_forward_pre_hook(lambda _, given: chosen.append(given[1].chosen)) for each in stacks]
    loss, _ = module(tokens, labels, keys=DropoutKeys(states=states))
    for hook in hooks:
        hook.remove()
    loss.backward()
    return loss.detach(), chosen


def grad(x: nn.Parameter) -> Tensor:
    """Return the gradient of a weight, which must have one."""
    assert x.grad is not None
    return x.grad


def differences(experts: Group | None, tensor: Group | None) -> dict[str, float]:
    """Return the largest difference of each fact on any rank."""
    found: dict[str, float] = {}
    for model in MODELS:
        for sequence in (False, True) if tensor else (False,):
            for recompute in ("none", "full"):
                for what, most in facts(model, experts, tensor, sequence=sequence, recompute=recompute):
                    key = f"{model}: {what}"
                    found[key] = max(most, found.get(key, 0.0))
    on_any = torch.tensor(list(found.values()))
    dist.all_reduce(on_any, dist.ReduceOp.MAX)
    return dict(zip(found, on_any.tolist(), strict=True))


def compare_layout(layout: str) -> int:
    """Fork the ranks of a layout; rank 0 prints the differences. Return how many failed."""
    ep, tp = map(int, layout.split("x"))
    rows: dict[GroupName, list[tuple[int, ...]]] = {
        "ep": [tuple(range(at, ep * tp, tp)) for at in range(tp)],
        "tp": [tuple(range(at * tp, at * tp + tp)) for at in range(ep)],
    }

    for model in MODELS:  # once, for all the ranks that are forked
        unsplit_results(model, ep)

    def run_rank(rank: int) -> None:
        groups: dict[GroupName, Group] = {}
        for name, ranks in rows.items():
            for members in ranks:
                handle = dist.new_group(list(members))
                if rank in members and len(members) > 1:
                    groups[name] = Group(name=name, ranks=members, rank=members.index(rank), handle=handle)
        found = differences(groups.get("ep"), groups.get("tp"))
        if rank == 0:
            print(json.dumps({layout: found}), flush=True)

    return fork_ranks(ep * tp, run_rank)


if __name__ == "__main__":
    raise SystemExit(sum(map(compare_layout, sys.argv[1:])))
