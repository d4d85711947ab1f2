"""The feed-forward half of a transformer layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...spec.run import Model
from ..joined_products import JoinedWeights
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
CLAMP, SLOPE = 7.0, 1.702  # of gpt-oss (arXiv:2508.10925 section 2.3): the largest gate and product, the slope of a sigmoid near GELU


def make_gate(act: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what makes a layer's activated products [..., F] of its gates and products, each [..., F]."""
    if act == "swiglu_clamped":
        return clamped_swiglu
    return partial(_gated_product, ACTIVATIONS[act])


def _gated_product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return (up + 1) gate sigmoid(1.702 gate), with gates of at most 7 and products between -7 and 7."""
    activated: Tensor = _ClampedSwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return activated


class _ClampedSwiGLU(torch.autograd.Function):
    """Saves its two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=CLAMP)
        return (up.clamp(-CLAMP, CLAMP) + 1) * (gate * torch.sigmoid(SLOPE * gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch.compiler.is_compiling():  # one kernel makes both; of operators that write in place the compiler would save more
            clamped = gate.clamp(max=CLAMP)
            share = torch.sigmoid(SLOPE * clamped)
            slope = share * (1 + SLOPE * clamped * (1 - share))
            gate_grad = torch.where(gate <= CLAMP, grad * (up.clamp(-CLAMP, CLAMP) + 1) * slope, 0.0)
            return gate_grad, torch.where(up.abs() <= CLAMP, grad * clamped * share, 0.0)
        value, share = _gate_value(gate)
        share.add_(value.addcmul_(value, share, value=-1), alpha=SLOPE)  # the slope of gate sigmoid(1.702 gate)
        del value
        gate_grad = share.mul_(grad).masked_fill_(gate > CLAMP, 0.0).mul_(up.clamp(-CLAMP, CLAMP).add_(1))
        value, share = _gate_value(gate)  # again: three tensors [..., F] are held at most
        del share
        return gate_grad, value.mul_(grad).masked_fill_(up > CLAMP, 0.0).masked_fill_(up < -CLAMP, 0.0)


def _gate_value(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate sigmoid(1.702 gate) of gates of at most 7, and that sigmoid."""
    value = gate.clamp(max=CLAMP)
    share = (SLOPE * value).sigmoid_()
    return value.mul_(share), share


class FeedForward(JoinedWeights):
    """Two linear layers around an activation; with a gate, the activated gate multiplies the first layer's output (arXiv:2002.05202)."""

    def __init__(self, parameters: Parameters, model: Model, tp: TensorParallel | None) -> None:
        super().__init__()
        scale = model.lora.scale
        self.gate = ColumnLinear(sub_parameters(parameters, "gate"), tp, scale) if "gate.weight" in parameters else None
        self.up = ColumnLinear(sub_parameters(parameters, "up"), tp, scale)
        self.down = RowLinear(sub_parameters(parameters, "down"), tp, scale)
        self.activation: Callable[..., Tensor] = ACTIVATIONS[model.act] if self.gate is None else make_gate(model.act)

    def column_layers(self) -> tuple[ColumnLinear, ...]:
        """Return the layers that share the input, in their order; none where there is one."""
        return () if self.gate is None else (self.gate, self.up)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        inputs = (self.up(x),) if self.gate is None else column_linears(x, self.gate, self.up, joined=self.joined_for(x), keeps_all=True)
        activated = self.activation(*inputs)  # [B, S, F]
        output: Tensor = self.down(activated)
        return output
