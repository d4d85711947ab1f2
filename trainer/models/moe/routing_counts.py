"""Counts of a mixture's routing, and what they say of it: how even the experts' loads are, which copies were dropped, near ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.held_results import take_held
from ...spec.run import Model
from .routing import Routing

# E experts, L layers with experts
BESIDE_LOADS = len(("copies that were computed", "near ties"))  # counts of a layer behind those of its experts


def count_routing(routing: Routing, near_ties: Tensor) -> Tensor:
    """Return the counts of a layer's routing, int64 [E + 2]: tokens that chose each expert, copies that are computed, near ties."""
    computed = routing.ends[-1:]
    return torch.cat((expert_loads(routing.chosen, len(routing.ends)), computed, near_ties.view(1)))


def expert_loads(chosen: Tensor, experts: int) -> Tensor:
    """Return how many tokens chose each expert, [E]. torch's bincount would wait for a GPU."""
    each = chosen.flatten()
    return each.new_zeros(experts).scatter_add_(0, each, torch.ones_like(each))


def mixture_layer_names(model: Model) -> tuple[str, ...]:
    """Return the logical names of a model's layers with experts, in order: those of modules that predict further tokens come last."""
    numbers, many = range(model.dense_layers, model.layer_groups), model.layers_in_group
    layers = [f"layers.{group}" if many == 1 else f"layers.{group}.{at}" for group in numbers for at in range(many)]
    return (*layers, *(f"mtp.{index}.layer" for index in range(model.mtp.layers)))


def take_routing_counts(modules: Sequence[nn.Module], model: Model, device: torch.device) -> Tensor:
    """Return the counts of all layers with experts, int64 [L (E + 2)], of all training forwards of these parts of the model since they were
    last taken; 0 of layers that other ranks have."""
    names = mixture_layer_names(model)
    counts = torch.zeros(len(names), (model.experts or 0) + BESIDE_LOADS, dtype=torch.int64, device=device)
    for module in modules:
        held: dict[str, Tensor] = getattr(module, "routing_counts", {})
        for name, each in held.items():
            counts[names.index(name)] = each
        held.clear()
    return counts.flatten()


def take_router_losses(module: nn.Module) -> list[Tensor]:
    """Return what the routers' losses added to that of a part's training forwards, sums over labels, since they were last taken."""
    return take_held(module, "added_losses")


class RoutingCounts:
    """The counts of a step over all ranks, on the device that summed them: `figures` waits for it."""

    def __init__(self, model: Model, counts: Tensor, ep: int = 1) -> None:
        """Take counts of any dtype, [L (E + 2)], and how many ranks share out the experts."""
        names = mixture_layer_names(model)
        self._ep, self._most = ep, model.most_ep_load  # no rank computes more, where experts have a capacity
        self._has_capacity = model.capacity is not None
        self._first = model.layers + model.mtp.layers - len(names)  # layers without experts, which come first
        self._rows = dict(zip(names, counts.view(len(names), -1), strict=True))
        self._counts = counts

    def loads(self, layer: str) -> Tensor:
        """Return how many tokens chose each expert of a layer, by its logical name, [E]."""
        row: Tensor = self._rows[layer]
        return row[:-BESIDE_LOADS]

    def rank_loads(self, layers: Sequence[str]) -> list[float]:
        """Return the tokens that chose the experts of each rank of `ep`, over an even share, in all of these layers together. It waits for
        the device. The ranks of several groups are taken to get as much from their own as from all tokens."""
        loads = torch.stack([self.loads(each) for each in layers]).double().sum(0).view(self._ep, -1).sum(1)
        found: list[float] = (loads * self._ep / loads.sum().clamp(min=1)).tolist()
        return found

    def figures(self) -> dict[str, Any]:
        """Return what a step's row says of its routing.

        - `near_ties`: tokens, of all layers, whose choice rounding decides.
        - `expert_load`: tokens that chose the busiest expert, over the mean of its layer's experts; of the layer where that is most,
          `busiest_layer`, numbered as in weights' names. arXiv:2408.15664's MaxVio is this less 1.
        - `ep_load`, where ranks share out the experts: tokens that chose those of the busiest rank, over an even share; the mean of all
          layers, each of which waits for its own. It is what parallel.ep_load plans.
        - `idle_experts`: experts, of all layers, that no token chose.
        - `dropped_copies`, where experts have a capacity: the share of the tokens' copies beyond it.
        """
        rows: list[list[float]] = self._counts.view(len(self._rows), -1).tolist()
        loads = [row[:-BESIDE_LOADS] for row in rows]
        copies, computed = sum(map(sum, loads)), sum(row[-2] for row in rows)
        peaks = [max(load) * len(load) / max(1, sum(load)) for load in loads]
        found: dict[str, Any] = {
            "near_ties": int(sum(row[-1] for row in rows)),
            "expert_load": round(max(peaks), 4),
            "busiest_layer": self._first + peaks.index(max(peaks)),
            "idle_experts": sum(load.count(0) for load in loads),
        }
        if self._ep > 1:
            found["ep_load"] = round(fmean(min(self._busiest_rank(load), self._most) for load in loads), 4)
        return found | ({"dropped_copies": round((copies - computed) / max(1, copies), 6)} if self._has_capacity else {})

    def _busiest_rank(self, load: Sequence[float]) -> float:
        """Return the tokens of a layer's busiest rank of experts over an even share, from those of each expert."""
        each = len(load) // self._ep
        return max(sum(load[first : first + each]) for first in range(0, len(load), each)) * self._ep / max(1, sum(load))


def step_biases(layers: Mapping[str, Any], counts: RoutingCounts, rate: float) -> None:
    """Step the bias of each of these layers (MoELayer), by logical name, by how many tokens chose its experts."""
    for name, layer in layers.items():
        step_bias(layer.router.constants["bias"], counts.loads(name), rate)


def step_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Add `rate` to the bias [E] of each expert that fewer tokens chose than the mean, and take it off where more did (arXiv:2408.15664
    algorithm 1)."""
    bias.add_((load.sum() - len(load) * load).sign().to(bias.dtype), alpha=rate)
