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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .group import Group
from .parameters_by_prefix import Parameters, sub_parameters
from .weight_gradients import open_weight_gradients, product

# B batch, S sequence, T ranks of the group, s = S / T, H hidden, I inner, O outer: this rank's columns


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The tensor-parallel group as layers see it. `sequence`: what is outside of split layers is split along the sequence.

    This rank's query heads begin at number `first_head`; the last `padded_heads` of them are padding.
    """

    group: Group
    sequence: bool
    first_head: int = 0
    padded_heads: int = 0

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
            return all_reduce(x.clone(), group)
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
        return AsyncReduceScatter(x, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AsyncAllGather(grad, ctx.group).wait(), None


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce x, contiguous, in place."""
    dist.all_reduce(x, op=op, group=group.handle)
    return x


def _is_async() -> bool:
    return not torch.compiler.is_compiling()


class AsyncAllGather:
    """An all-gather, under way, of each rank's part of the sequence [B, s, ...]; wait() returns [B, S, ...].

    A compiled graph holds no message under way, so that there it is done at once; so are the others.
    """

    def __init__(self, x: Tensor, group: Group) -> None:
        self.ranks, self.own = group.size, x.contiguous()
        self.received = x.new_empty((group.size * x.shape[0], *x.shape[1:]))  # [T B, s, ...]
        self.work = dist.all_gather_into_tensor(self.received, self.own, group=group.handle, async_op=_is_async())

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return torch.unflatten(self.received, 0, (self.ranks, -1)).transpose(0, 1).flatten(1, 2)


class AsyncReduceScatter:
    """A reduce-scatter of [B, S, ...] under way; wait() returns this rank's part of the sum, [B, s, ...]."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.sent = torch.unflatten(x, 1, (group.size, -1)).transpose(0, 1).contiguous()  # [T, B, s, ...]
        self.received = torch.empty_like(self.sent[0])
        self.work = dist.reduce_scatter_tensor(self.received, self.sent.flatten(0, 1), group=group.handle, async_op=_is_async())

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class _AsyncAllReduce:
    """An all-reduce of a contiguous tensor, in place, under way."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.x = x
        self.work = dist.all_reduce(x, group=group.handle, async_op=_is_async())

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.x


class Linear(nn.Module):
    """x W + b. Autograd saves the parameter, never a view of it: ZeRO-3 frees the parameter's memory before backward.

    A subclass whose parameters include LoRA's sets `lora_a` and `lora_b`.
    """

    def __init__(self, parameters: Parameters, lora_scale: float = 0.0) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self.lora_a: Linear | None = None
        self.lora_b: Linear | None = None
        self.lora_scale = lora_scale

    def add_lora(self, x: Tensor, output: Tensor) -> Tensor:
        """Return `output` with LoRA's scale x A B of the layer's input x, where the layer has it."""
        if self.lora_a is None or self.lora_b is None:
            return output
        return torch.add(output, self.lora_b(self.lora_a(x)), alpha=self.lora_scale)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class ColumnLinear(Linear):
    """x W + b with W's columns split: f, then each rank computes its own outputs. `tp` None: this rank has all columns.

    With LoRA parameters it adds scale x A B: every rank has all of A [I, R], and its own columns of B [R, O].
    """

    def __init__(self, parameters: Parameters, tp: TensorParallel | None, lora_scale: float = 0.0) -> None:
        super().__init__(parameters, lora_scale)
        self.tp = tp
        if "lora_a.weight" in parameters:
            self.lora_a = Linear(sub_parameters(parameters, "lora_a"))
            self.lora_b = ColumnLinear(sub_parameters(parameters, "lora_b"), tp)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S or s, I] -> [B, S, O]."""
        (output,) = column_linears(x, self)
        return output


class RowLinear(Linear):
    """x W + b with W's rows split: each rank computes its terms of the sum, then g. The bias is added once, to the sum.

    With LoRA parameters it adds scale x A B: each rank has its own rows of A [I, R], whose products are summed, and all of B [R, H].
    """

    def __init__(self, parameters: Parameters, tp: TensorParallel | None, lora_scale: float = 0.0) -> None:
        super().__init__(parameters, lora_scale)
        self.tp = tp
        if "lora_a.weight" in parameters:
            self.lora_a = RowLinear(sub_parameters(parameters, "lora_a"), tp)
            self.lora_b = Linear(sub_parameters(parameters, "lora_b"))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, I] -> [B, S or s, H]."""
        if self.tp is None:
            output = product(x, self.weight, self.bias)
        else:
            output = reduce_outputs(product(x, self.weight), self.tp)
            output = output if self.bias is None else output + self.bias
        return self.add_lora(x, output)


def column_linears(x: Tensor, *layers: ColumnLinear) -> tuple[Tensor, ...]:
    """Apply several column layers to one input, which is sent once: x [B, S or s, I] -> [B, S, O] for each layer."""
    tp = layers[0].tp
    if tp is None and len(layers) > 1:
        return tuple(layer(x) for layer in layers)  # by their own forward, where ZeRO-3 gathers their weights
    if tp is None:
        outputs: tuple[Tensor, ...] = (product(x, layers[0].weight, layers[0].bias),)
    else:
        outputs = column_products(x, tp, [layer.weight for layer in layers], [layer.bias for layer in layers], transposed=False)
    return tuple(layer.add_lora(x, output) for layer, output in zip(layers, outputs, strict=True))


def column_products(
    x: Tensor, tp: TensorParallel, weights: list[nn.Parameter], biases: list[nn.Parameter | None], *, transposed: bool
) -> tuple[Tensor, ...]:
    """Return f(x) W + b for each weight [I, O] (transposed: [O, I]). Backward sends the input's gradient while it computes the
    weights' gradients."""
    if not torch.is_grad_enabled():  # a compiled evaluation can't trace the function
        return _whole_products(x, tp, transposed, weights, biases)
    outputs: tuple[Tensor, ...] = _ColumnProducts.apply(x, tp, transposed, *weights, *biases)  # type: ignore[no-untyped-call]
    return outputs


def _whole_products(
    x: Tensor, tp: TensorParallel, transposed: bool, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    whole = AsyncAllGather(x, tp.group).wait() if tp.sequence else x
    return tuple(product(whole, weight, bias, transposed=transposed) for weight, bias in zip(weights, biases, strict=True))


def _after(x: Tensor, grad: Tensor) -> Tensor:
    """Return x, in a compiled graph as a copy that needs `grad`: the compiler computes what needs no gradient in forward, and keeps it."""
    if not torch.compiler.is_compiling():
        return x
    return torch.cat((x.flatten(), grad.flatten()[:1].to(x.dtype)))[:-1].view_as(x)


class _ColumnProducts(torch.autograd.Function):
    """Saves the input as it came: under sequence parallelism this rank's part, which backward all-gathers again; with frozen weights no
    input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, transposed: bool, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.save_for_backward(x if any(weight.requires_grad for weight in weights) else None, *weights)
        ctx.tp, ctx.transposed, ctx.has_bias = tp, transposed, [bias is not None for bias in biases]
        ctx.gradients, ctx.parameters = open_weight_gradients(*weights), weights
        return _whole_products(x, tp, transposed, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        tp, output_grads = ctx.tp, [grad.flatten(0, -2) for grad in grads]  # [B S, O]
        if ctx.gradients is not None:
            ctx.gradients.defer(ctx.parameters, partial(_weight_gradients, x, output_grads, tp, ctx.transposed))
            x = None
        gather = AsyncAllGather(_after(x, grads[0]), tp.group) if tp.sequence and x is not None else None
        x_grad = _input_gradient(output_grads, weights, ctx.transposed)
        x_grad = x_grad.view(*grads[0].shape[:-1], -1)  # [B, S, I]: this rank's terms
        whole = x if gather is None else gather.wait()
        del gather  # what it received, in the order of ranks, is whole too
        reduction = AsyncReduceScatter(x_grad, tp.group) if tp.sequence else _AsyncAllReduce(x_grad, tp.group)
        del x_grad
        weight_grads: list[Tensor | None] = [None] * len(weights)
        bias_grads: list[Tensor | None] = [None] * len(weights)
        if whole is not None:
            weight_grads = [*_products_with(whole, output_grads, ctx.transposed)]
        if whole is not None or ctx.gradients is not None:
            bias_grads = [grad.sum(0) if has_bias else None for grad, has_bias in zip(output_grads, ctx.has_bias, strict=True)]
        return reduction.wait(), None, None, *weight_grads, *bias_grads


def _input_gradient(output_grads: Sequence[Tensor], weights: Sequence[Tensor], transposed: bool) -> Tensor:
    """Return the gradient [B S, I] of an input of several products, from those of their outputs [B S, O]."""
    total: Tensor | None = None
    for grad, weight in zip(output_grads, weights, strict=True):
        term = grad @ (weight if transposed else weight.mT)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def _weight_gradients(x: Tensor, output_grads: Sequence[Tensor], tp: TensorParallel, transposed: bool) -> list[Tensor]:
    """Return the gradients of weights that share an input, x [B, S or s, I], from those of their outputs [B S, O]."""
    whole = AsyncAllGather(x, tp.group).wait() if tp.sequence else x
    return _products_with(whole, output_grads, transposed)


def _products_with(whole: Tensor, output_grads: Sequence[Tensor], transposed: bool) -> list[Tensor]:
    inputs = whole.flatten(0, -2)  # [B S, I]
    return [grad.mT @ inputs if transposed else inputs.mT @ grad for grad in output_grads]
