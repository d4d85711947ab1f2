"""What a rank holds of the model's parameters and of the optimizer's states, by logical name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.rank_group import GroupName
from ..plan.axes.weight_slices import WeightShard
from ..plan.layout.checkpoint_kinds import AVERAGE
from ..plan.layout.workers import OUTER_MOMENTUM
from .quantized_moment import QuantizedMoment

ERROR = "compression_error"  # the kind of errors in checkpoints
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", OUTER_MOMENTUM, AVERAGE)  # tensors that optimizers keep for each element


class RankParameter(NamedTuple):
    """A parameter of this rank, its logical name and its shard of that weight; `tied`: a copy of a weight of another part."""

    name: str
    parameter: nn.Parameter
    shard: WeightShard
    tied: bool

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the parameter in norms: of the ranks of a replica that hold the same shard, one does."""
        return self.shard.copy == 0 and not self.tied


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """Flat elements [start, start + length) of a parameter, which the optimizer of this rank steps.

    `weight` is the float32 tensor that is stepped. `state` is the optimizer's state of a tensor in which these elements begin at `offset`.
    `copies` is the group of data-parallel ranks that step them too; None: no other does. `error` is what compression left out of these
    elements' gradients, alike on all of those ranks where a checkpoint is saved; None: it left out nothing.
    """

    shard: WeightShard
    tied: bool
    start: int
    length: int
    weight: Tensor
    state: dict[str, Any]
    offset: int
    copies: GroupName | None
    error: Tensor | None = None

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, flat view) of each state, or a copy that is widened in the host's memory where it is kept in 8 bits."""
        for kind in STATES:
            held = self.state.get(kind)
            if isinstance(held, Tensor):
                yield kind, held.view(-1).narrow(0, self.offset, self.length)
            elif isinstance(held, QuantizedMoment):
                yield kind, held.widen_part(self.offset, self.length)

    def is_widened(self, kind: str) -> bool:
        """Whether `states` widens the state of a kind: what it yields is a copy."""
        return isinstance(self.state.get(kind), QuantizedMoment)

    def load_states(self, read: Callable[[str], Tensor]) -> None:
        """Give each state the flat elements that `read` returns of its kind."""
        for kind in STATES:
            held = self.state.get(kind)
            if isinstance(held, Tensor):
                held.view(-1).narrow(0, self.offset, self.length).copy_(read(kind))
            elif isinstance(held, QuantizedMoment):
                held.keep_part(self.offset, read(kind))


def whole_parameter(row: RankParameter, optimizer: torch.optim.Optimizer) -> OptimizerShard:
    """Return all of a parameter that torch's optimizer steps directly."""
    flat = row.parameter.data.view(-1)
    state = optimizer_state(optimizer, row.parameter)
    copies: GroupName = "expert_copies" if row.shard.expert else "data"
    return OptimizerShard(shard=row.shard, tied=row.tied, start=0, length=flat.numel(), weight=flat, state=state, offset=0, copies=copies)


def optimizer_state(optimizer: torch.optim.Optimizer, stepped: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a tensor; before its first step, create it as the optimizer would."""
    state: dict[str, Any] = optimizer.state[stepped]
    if not state and isinstance(optimizer, torch.optim.AdamW):
        state["step"] = torch.zeros((), device=stepped.device if stepped.is_cuda else "cpu")
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(stepped), torch.zeros_like(stepped)
    elif not state and not isinstance(optimizer, torch.optim.SGD):  # a resume would silently begin without its moments
        raise TypeError(f"the states of {type(optimizer).__name__} before its first step are not known here")
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] and state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(stepped)
    return state
