"""Dropout of what LoRA's A multiplies (arXiv:2106.09685; lora_dropout of PEFT): its mask is the same in every layout."""

from __future__ import annotations

from torch import Tensor, nn

from ...spec.run import Model
from ..counter_rng import dropout
from ..dropout import Dropout
from ..tensor_parallel import InputDropout, Linear, RowLinear, TensorParallel
from .attention import Attention
from .layer_inputs import LayerInputs

# B batch, S sequence, I inner: this rank's rows of A


class LoraDropout(Dropout, InputDropout):
    """Dropout of one product's input, keyed by the layer and the product. `first` is the number of this rank's first element in the whole
    input, of which it has all tokens (`has_all_tokens`) or under sequence parallelism its part of the sequence."""

    def __init__(self, p: float, layer: int, site: str, *, first: int, has_all_tokens: bool) -> None:
        super().__init__(p, layer, site)
        self.first, self.has_all_tokens = first, has_all_tokens
        self.states: Tensor | None = None

    def take_states(self, inputs: LayerInputs) -> None:
        """Take the states of the micro-batch that the layer begins to compute, or that backward computes again."""
        self.states = inputs.own_dropout_states if self.has_all_tokens else inputs.sharded_dropout_states

    def drop(self, x: Tensor) -> Tensor:
        """Drop elements of x [B, S or s, I]."""
        return x if self.states is None else dropout(x, self.p, self.row_states(self.states), self.first)


def add_lora_dropouts(layer: nn.Module, model: Model, number: int, tp: TensorParallel | None) -> list[LoraDropout]:
    """Give each product of a layer that has LoRA's A and B its dropout, and return them."""
    made = []
    for name, each in list(layer.named_modules()):
        if isinstance(each, Linear) and each.lora_a is not None:
            is_row = isinstance(each, RowLinear)
            has_heads = name == "attention.out" and isinstance(layer.attention, Attention)
            first = _first_row(each, model, tp, has_heads=has_heads) if is_row and tp else 0
            each.lora_dropout = LoraDropout(model.lora.dropout, number, f"lora.{name}", first=first, has_all_tokens=is_row)
            made.append(each.lora_dropout)
    return made


def _first_row(product: Linear, model: Model, tp: TensorParallel, *, has_heads: bool) -> int:
    """Return the number, in the whole matrix, of this rank's first row of a product whose rows are split; `has_heads`: they are those of
    heads, shared out as `TensorParallel` says."""
    if has_heads:
        return tp.first_head * (model.v_head_dim or model.head_dim or model.hidden // model.heads)
    return tp.group.rank * product.weight.shape[0]
