"""The figures of a step beside gradients, and their sums over ranks: losses, preferences, the counts of a mixture's routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers.preference_loss import FIGURES, take_pair_results
from ..layers.transformer.multi_token_prediction import take_further_losses
from ..models.families import has_experts
from ..models.moe.routing_counts import RoutingCounts, take_router_losses, take_routing_counts
from ..parallel.process_groups import Grid
from ..plan.costs.control_message import further_losses
from ..spec.run import Run

# L layers with experts, E experts


class PreferenceFigures(NamedTuple):
    """Means over pairs: the share whose chosen answer has the higher reward, the reward of chosen and of rejected answers."""

    accuracy: float
    chosen_reward: float
    rejected_reward: float


class StepFigures:
    """Takes what the forwards of a step have found on this rank's parts of the model, and names it once all ranks have added it up.

    In a step's sums the loss comes first, behind it `further_losses` and the counts of routing; engine `native` has the squares of its
    gradients behind the loss.
    """

    def __init__(self, run: Run, grid: Grid, modules: Sequence[nn.Module]) -> None:
        self.run, self.grid, self.modules = run, grid, modules
        self.losses = 1 + further_losses(run)  # numbers before the counts of routing
        self.counts_tokens = not grid.coordinate("tp")  # the ranks of a tensor-parallel group compute the same figures

    def take_losses(self, total: Tensor) -> Tensor:
        """Return the sum of a step's losses on this rank and behind it those of `further_losses`: float64. Counts the latter anew."""
        zero, losses = torch.zeros_like(total), [total]
        if self.run.model.mtp.layers:
            losses.append(sum((each for module in self.modules for each in take_further_losses(module)), zero))
        if self.run.model.adds_router_loss:
            losses.append(sum((each for module in self.modules for each in take_router_losses(module)), zero))
        if self.run.data.has_preferences:
            losses.extend(self.take_pair_sums())
        return torch.stack([each.double() for each in losses])

    def take_pair_sums(self) -> Tensor:
        """Return the sums of all pairs (PairResults) that this rank's forwards have found since this was last called, float64 [3]."""
        found = [each.sums for module in self.modules for each in take_pair_results(module)]
        return sum(found, torch.zeros(FIGURES, dtype=torch.float64, device=self.grid.world.device))

    def take_all(self) -> Tensor:
        """Return all figures but the loss, float64: `further_losses`, and the counts of routing. Counts them anew."""
        further = self.take_losses(torch.zeros((), device=self.grid.world.device))[1:] * self.counts_tokens
        return torch.cat((further, self._take_counts().double()))

    def join(self, total: Tensor, squares: Tensor, others: Tensor) -> Tensor:
        """Return this rank's terms of a step's sums, float64: the loss, the squares of gradients, and `others`, of `take_all`."""
        loss = total.double() if self.counts_tokens else torch.zeros((), dtype=torch.float64, device=total.device)
        return torch.cat((torch.stack((loss, squares)), others))

    def split(self, sums: Tensor) -> tuple[list[float], Tensor]:
        """Return (loss, squares and further losses, counts of routing) of sums of what `join` returns. It waits for the device."""
        return sums[: 1 + self.losses].tolist(), sums[1 + self.losses :]

    def sum_counts(self) -> Tensor:
        """Return the counts of the routing of the step just done on all ranks, int64 [L (E + 2)]; empty where the model has no experts."""
        counts = self._take_counts()
        if len(counts):
            dist.all_reduce(counts)
        return counts

    def result_fields(self, means: Sequence[float], counts: Tensor) -> dict[str, Any]:
        """Return the fields of a StepResult with `further_losses`, as means over the global batch, and the counts of all ranks' routing."""
        left = list(means)
        found: dict[str, Any] = {"routing": RoutingCounts(self.run.model, counts, self.run.parallel.ep) if len(counts) else None}
        if self.run.model.mtp.layers:
            found["mtp_loss"] = left.pop(0)
        if self.run.model.adds_router_loss:
            found["router_loss"] = left.pop(0)
        return found | ({"preferences": PreferenceFigures(*left)} if self.run.data.has_preferences else {})

    def _take_counts(self) -> Tensor:
        """Return what this rank counts of the routing of the step just done, int64 [L (E + 2)], and count anew."""
        device = self.grid.world.device
        if not has_experts(self.run.model):
            return torch.zeros(0, dtype=torch.int64, device=device)
        counts = take_routing_counts(self.modules, self.run.model, device)
        return counts if self.counts_tokens else counts.zero_()
