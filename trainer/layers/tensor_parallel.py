"""Tensor-parallel linear layers: the f and g of Megatron-LM (arXiv:1909.08053 section 3), and their sequence-parallel forms
(arXiv:2205.05198 section 4.2.2).

Heads, feed-forward and vocabulary are split over the ranks of a group. f (`gather_inputs`) stands before a split layer: it copies in
forward and all-reduces in backward. g (`reduce_outputs`) stands after it: it all-reduces in forward and copies in backward. Under
sequence parallelism f all-gathers and its backward reduce-scatters; g is the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .compiled_outputs import as_output
from .fp8 import BACKWARD, FORWARD, OUTPUT, Scaled, cast, fp8_affine, fp8_input_gradient, fp8_product, scaled_product
from .group_messages import AsyncAllGather, AsyncAllReduce, AsyncReduceScatter, all_reduce
from .joined_products import joined_products
from .parameters_by_prefix import Parameters, sub_parameters
from .rank_group import Group
from .weight_gradients import open_weight_gradients, product

# B batch, S sequence, T ranks of the group, s = S / T, H hidden, I inner, O outer: this rank's columns


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The tensor-parallel group as layers see it. `sequence`: what is outside of split layers is split along the sequence.

    This rank's query heads begin at number `first_head`; the last `padded_heads` of them are padding. Each key and value head is held by
    `kv_copies` ranks.
    """

    group: Group
    sequence: bool
    first_head: int = 0
    padded_heads: int = 0
    kv_copies: int = 1

    def shard(self, x: Tensor) -> Tensor:
        """Return what this rank has of x [B, S, ...] outside of split layers: all of it, or its part of the sequence."""
        if not self.sequence:
            return x
        return x.chunk(self.group.size, dim=1)[self.group.rank]


def gather_inputs(x: Tensor, tp: TensorParallel) -> Tensor:
    """Megatron's f: the whole input of a split layer, x [B, S or s, H] -> [B, S, H]."""
    whole: Tensor = _Gather.apply(x, tp.group) if tp.sequence else _Copy.apply(x, tp.group)  # type: ignore[no-untyped-call]
    return whole


def reduce_outputs(x: Tensor, tp: TensorParallel) -> Tensor:
    """Megatron's g: the sum over ranks of a split layer's output, x [B, S, H] -> [B, S or s, H]. Overwrites x."""
    total: Tensor = _Scatter.apply(x, tp.group) if tp.sequence else _Sum.apply(x, tp.group)  # type: ignore[no-untyped-call]
    return total


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.contiguous().clone(), ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if torch.compiler.is_compiling():
            return as_output(all_reduce(x.clone(), group))
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return AsyncAllGather(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AsyncReduceScatter(grad, ctx.group).wait(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return as_output(AsyncReduceScatter(x, group).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AsyncAllGather(grad, ctx.group).wait(), None


class InputDropout(Protocol):
    """Dropout that knows the tokens of its input."""

    def drop(self, x: Tensor) -> Tensor:
        """Return x [B, S or s, I] with some elements 0."""


class Linear(nn.Module):
    """x W + b. Autograd saves the parameter, never a view of it: ZeRO-3 frees the parameter's memory before backward.

    With LoRA parameters it adds scale x A B, of A [I, R] and B [R, O], with `lora_dropout` of that x. `in_fp8`: it multiplies inputs in
    bf16 as 8-bit floats; a saved model, which is read in float32, does not. `stays_wide`: it never does, having few columns.
    """

    stays_wide = False

    def __init__(self, parameters: Parameters, lora_scale: float = 0.0) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self.lora_a: Linear | None = None
        self.lora_b: Linear | None = None
        self.lora_scale = lora_scale
        self.lora_dropout: InputDropout | None = None
        self.in_fp8 = False
        if "lora_a.weight" in parameters:
            self.lora_a, self.lora_b = self.make_lora(sub_parameters(parameters, "lora_a"), sub_parameters(parameters, "lora_b"))

    def make_lora(self, a: Parameters, b: Parameters) -> tuple[Linear, Linear]:
        """Make the layers of A and of B; a subclass that is split overrides it."""
        return Linear(a), Linear(b)

    def add_lora(self, x: Tensor, output: Tensor) -> Tensor:
        """Return `output` with LoRA's scale x A B of the layer's input x, where the layer has it."""
        if self.lora_a is None or self.lora_b is None:
            return output
        x = x if self.lora_dropout is None else self.lora_dropout.drop(x)
        return torch.add(output, self.lora_b(self.lora_a(x)), alpha=self.lora_scale)

    def casts(self, x: Tensor) -> bool:
        """Whether this layer multiplies an input x in 8-bit floats."""
        return self.in_fp8 and x.dtype == OUTPUT

    def multiply(self, x: Tensor, bias: Tensor | None, shared: Scaled | None = None) -> Tensor:
        """Return x W + bias, with x as `shared` where another layer has cast it."""
        if self.casts(x):
            return fp8_product(x, self.weight, bias, shared)
        return product(x, self.weight, bias)

    def forward(self, x: Tensor, shared: Scaled | None = None) -> Tensor:
        return self.add_lora(x, self.multiply(x, self.bias, shared))


class ColumnLinear(Linear):
    """x W + b with W's columns split: f, then each rank computes its own outputs. `tp` None: this rank has all columns.

    With LoRA parameters it adds scale x A B: every rank has all of A [I, R], and its own columns of B [R, O].
    """

    def __init__(self, parameters: Parameters, tp: TensorParallel | None, lora_scale: float = 0.0) -> None:
        self.tp = tp
        super().__init__(parameters, lora_scale)

    def make_lora(self, a: Parameters, b: Parameters) -> tuple[Linear, Linear]:
        return Linear(a), ColumnLinear(b, self.tp)

    def forward(self, x: Tensor, shared: Scaled | None = None) -> Tensor:
        """x [B, S or s, I] -> [B, S, O]."""
        if self.tp is None:
            return self.add_lora(x, self.multiply(x, self.bias, shared))
        (output,) = column_linears(x, self)
        return output


class RowLinear(Linear):
    """x W + b with W's rows split: each rank computes its terms of the sum, then g. The bias is added once, to the sum.

    With LoRA parameters it adds scale x A B: each rank has its own rows of A [I, R], whose products are summed, and all of B [R, H].
    """

    def __init__(self, parameters: Parameters, tp: TensorParallel | None, lora_scale: float = 0.0) -> None:
        self.tp = tp
        super().__init__(parameters, lora_scale)

    def make_lora(self, a: Parameters, b: Parameters) -> tuple[Linear, Linear]:
        return RowLinear(a, self.tp), Linear(b)

    def forward(self, x: Tensor, shared: Scaled | None = None) -> Tensor:
        """x [B, S, I] -> [B, S or s, H]."""
        if self.tp is None:
            output = self.multiply(x, self.bias, shared)
        else:
            output = reduce_outputs(self.multiply(x, None, shared), self.tp)
            output = output if self.bias is None else output + self.bias
        return self.add_lora(x, output)


def column_linears(x: Tensor, *layers: ColumnLinear, joined: Tensor | None = None, keeps_all: bool = False) -> tuple[Tensor, ...]:
    """Apply several column layers to one input, which is sent once: x [B, S or s, I] -> [B, S, O] for each layer. `joined` are their
    weights in one tensor, and `keeps_all` says whether backward needs all outputs, as of `joined_products`."""
    tp = layers[0].tp
    if joined is not None:
        return joined_products(x, joined, [layer.weight for layer in layers], [layer.bias for layer in layers], keeps_all=keeps_all)
    if tp is None:
        shared = cast_for(x, *layers)
        return tuple(layer(x, shared) for layer in layers)  # by their own forward, where ZeRO-3 gathers their weights
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    cast_layers = [layer.casts(x) for layer in layers]
    assert cast_layers == sorted(cast_layers, reverse=True), "layers in 8-bit floats come first"
    outputs = column_products(x, tp, weights, biases, transposed=False, in_fp8=sum(cast_layers))
    return tuple(layer.add_lora(x, output) for layer, output in zip(layers, outputs, strict=True))


def cast_for(x: Tensor, *layers: Linear) -> Scaled | None:
    """Cast the input of several layers once, where they multiply in 8-bit floats."""
    return cast(x, FORWARD) if any(layer.casts(x) for layer in layers) else None


def column_products(
    x: Tensor,
    tp: TensorParallel,
    weights: list[nn.Parameter],
    biases: list[nn.Parameter | None],
    *,
    transposed: bool,
    in_fp8: int = 0,
) -> tuple[Tensor, ...]:
    """Return f(x) W + b for each weight [I, O] (transposed: [O, I]); the first `in_fp8` in 8-bit floats. Backward sends the input's
    gradient while it computes the weights' gradients."""
    if not torch.is_grad_enabled():  # a compiled evaluation can't trace the function
        whole = _whole_input(x, tp)
        return _whole_products(whole, cast(whole, FORWARD) if in_fp8 else None, transposed, in_fp8, weights, biases)
    outputs: tuple[Tensor, ...] = _ColumnProducts.apply(x, tp, transposed, in_fp8, *weights, *biases)  # type: ignore[no-untyped-call]
    return outputs


def _whole_input(x: Tensor, tp: TensorParallel) -> Tensor:
    return AsyncAllGather(x, tp.group).wait() if tp.sequence else x


def _whole_products(
    x: Tensor, scaled: Scaled | None, transposed: bool, in_fp8: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    pairs = [*zip(weights, biases, strict=True)]
    in_bytes = [fp8_affine(scaled, weight, bias) for weight, bias in pairs[:in_fp8]] if scaled else []
    return *in_bytes, *(product(x, weight, bias, transposed=transposed) for weight, bias in pairs[in_fp8:])


def _after(x: Tensor, grad: Tensor) -> Tensor:
    """Return x, in a compiled graph as a copy that needs `grad`: the compiler computes what needs no gradient in forward, and keeps it."""
    if not torch.compiler.is_compiling():
        return x
    return torch.cat((x.flatten(), grad.flatten()[:1].to(x.dtype)))[:-1].view_as(x)


class _ColumnProducts(torch.autograd.Function):
    """Saves the input as it came: under sequence parallelism this rank's part, which backward all-gathers again. Else it is saved in each
    form in which it was multiplied, as 8-bit floats and as it came; with frozen weights in none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, transposed: bool, in_fp8: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        whole = _whole_input(x, tp)
        scaled = cast(whole, FORWARD) if in_fp8 else None
        kept = [x if tp.sequence or in_fp8 < len(weights) else None, *(scaled if scaled and not tp.sequence else (None, None))]
        ctx.save_for_backward(*(kept if any(weight.requires_grad for weight in weights) else (None, None, None)), *weights)
        ctx.tp, ctx.transposed, ctx.in_fp8, ctx.has_bias = tp, transposed, in_fp8, [bias is not None for bias in biases]
        ctx.gradients, ctx.parameters = open_weight_gradients(*weights), weights
        return _whole_products(whole, scaled, transposed, in_fp8, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, values, scale, *weights = ctx.saved_tensors
        tp, rows = ctx.tp, [grad.flatten(0, -2) for grad in grads]  # [B S, O]
        output_grads: Sequence[Tensor | Scaled] = [*(cast(grad, BACKWARD) for grad in rows[: ctx.in_fp8]), *rows[ctx.in_fp8 :]]
        scaled = None if values is None else Scaled(values, scale)
        if ctx.gradients is not None:
            x = None if x is None else x.detach()  # without the graph behind it
            some = [each for each in (x, scaled, *output_grads) if each is not None]
            held = [tensor for each in some for tensor in (each if isinstance(each, Scaled) else (each,))]
            ctx.gradients.defer(ctx.parameters, partial(_weight_gradients, x, scaled, output_grads, tp, ctx.transposed), held)
            x = scaled = None
        gather = AsyncAllGather(_after(x, grads[0]), tp.group) if tp.sequence and x is not None else None
        x_grad = _input_gradient(output_grads, weights, ctx.transposed)
        x_grad = x_grad.view(*grads[0].shape[:-1], -1)  # [B, S, I]: this rank's terms
        whole = x if gather is None else gather.wait()
        del gather  # what it received, in the order of ranks, is whole too
        reduction = AsyncReduceScatter(x_grad, tp.group) if tp.sequence else AsyncAllReduce(x_grad, tp.group)
        del x_grad
        weight_grads: list[Tensor | None] = [None] * len(weights)
        bias_grads: list[Tensor | None] = [None] * len(weights)
        if whole is not None or scaled is not None:
            weight_grads = [*_products_with(whole, scaled, output_grads, ctx.transposed)]
        if whole is not None or scaled is not None or ctx.gradients is not None:
            bias_grads = [grad.sum(0) if has_bias else None for grad, has_bias in zip(rows, ctx.has_bias, strict=True)]
        return reduction.wait(), None, None, None, *weight_grads, *bias_grads


def _input_gradient(output_grads: Sequence[Tensor | Scaled], weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Return the gradient [B S, I] of an input of several products, from those of their outputs [B S, O]."""
    total: Tensor | None = None
    for grad, weight in zip(output_grads, weights, strict=True):
        term = fp8_input_gradient(grad, weight) if isinstance(grad, Scaled) else grad @ (weight if transposed else weight.mT)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def _weight_gradients(
    x: Tensor | None, scaled: Scaled | None, output_grads: Sequence[Tensor | Scaled], tp: TensorParallel, transposed: bool
) -> list[Tensor]:
    """Return the gradients of weights that share an input, x [B, S or s, I] or `scaled`, from those of their outputs [B S, O]."""
    return _products_with(None if x is None else _whole_input(x, tp), scaled, output_grads, transposed)


def _products_with(whole: Tensor | None, scaled: Scaled | None, output_grads: Sequence[Tensor | Scaled], transposed: bool) -> list[Tensor]:
    if scaled is None and whole is not None and any(isinstance(grad, Scaled) for grad in output_grads):
        scaled = cast(whole, FORWARD)
    rows, inputs = None if whole is None else whole.flatten(0, -2), None if scaled is None else scaled.rows.mT
    gradients = []
    for grad in output_grads:
        if isinstance(grad, Scaled):
            assert inputs is not None
            gradients.append(scaled_product(inputs, grad))
        else:
            assert rows is not None
            gradients.append(grad.mT @ rows if transposed else rows.mT @ grad)
    return gradients
