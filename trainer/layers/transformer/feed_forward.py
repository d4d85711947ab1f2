"""The feed-forward half of a transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ...spec.run import Model
from ..parameters_by_prefix import Parameters, sub_parameters
from ..tensor_parallel import ColumnLinear, RowLinear, TensorParallel, column_linears

# B batch, S sequence, H hidden, F ffn: this rank's part of it

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """Two linear layers around an activation; with a gate, the activated gate multiplies the first layer's output (arXiv:2002.05202)."""

    def __init__(self, parameters: Parameters, model: Model, tp: TensorParallel | None) -> None:
        super().__init__()
        scale = model.lora.scale
        self.gate = ColumnLinear(sub_parameters(parameters, "gate"), tp, scale) if "gate.weight" in parameters else None
        self.up = ColumnLinear(sub_parameters(parameters, "up"), tp, scale)
        self.down = RowLinear(sub_parameters(parameters, "down"), tp, scale)
        self.activation = ACTIVATIONS[model.act]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        if self.gate is None:
            activated = self.activation(self.up(x))  # [B, S, F]
        else:
            gate, up = column_linears(x, self.gate, self.up)
            activated = self.activation(gate) * up
        output: Tensor = self.down(activated)
        return output
