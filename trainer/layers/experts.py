"""Expert layers: stacks of matrices, each multiplying the rows routed to it, here or on the ranks of a group (arXiv:2006.16668)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .compiled_outputs import as_output
from .group_messages import all_reduce
from .parameters_by_prefix import Parameters, sub_parameters
from .rank_group import Group
from .tensor_parallel import TensorParallel
from .weight_gradients import open_weight_gradients

# T tokens, K copies of each, C copies that are computed, E experts, R ranks of the group, e = E / R, I inner, O outer


class ExpertLinear(nn.Module):
    """x W + b, with W the matrix and b the bias, where there is one, of each row's expert.

    `tp` are the ranks that add up their outputs: each has a bias whole and adds its part of it. Its gradient is the same on each; under
    sequence parallelism they add it up once a step, and each has its part. `partial`: the ranks that have W whole, and of its gradient the
    part of their own columns or rows. They add these up in backward; under sequence parallelism they do so once a step.
    """

    def __init__(self, parameters: Parameters, tp: TensorParallel | None = None, *, partial: TensorParallel | None = None) -> None:
        super().__init__()
        self.weight, self.bias = parameters["weight"], parameters.get("bias")
        self.ranks = 1 if tp is None else tp.group.size
        self.sums = 1 if tp is None or not tp.sequence else tp.group.size
        self.summed = None if partial is None or partial.sequence else partial.group

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [C, I] -> [C, O]; the rows of expert e end at `ends[e]`."""
        given = (x, self.weight, self.bias, ends, self.ranks, self.sums, self.summed)
        output: Tensor = _GroupedMatmul.apply(*given)  # type: ignore[no-untyped-call]
        return output


class LoraExpertLinear(ExpertLinear):
    """An ExpertLinear that adds scale x A B, with A [I, R] and B [R, O] of each row's expert, where it has LoRA's parameters.

    The ranks of `columns` have columns of W each: all have A whole and their own columns of B. Those of `rows` have rows of it and add up
    their outputs: all have their own rows of A, and B whole, and what each makes of A B is its terms of the same sum.
    """

    def __init__(
        self, parameters: Parameters, lora_scale: float, *, columns: TensorParallel | None = None, rows: TensorParallel | None = None
    ) -> None:
        super().__init__(parameters, rows)
        self.lora_scale = lora_scale
        self.lora_a: ExpertLinear | None = None
        self.lora_b: ExpertLinear | None = None
        if "lora_a.weight" in parameters:
            self.lora_a = ExpertLinear(sub_parameters(parameters, "lora_a"), partial=columns)
            self.lora_b = ExpertLinear(sub_parameters(parameters, "lora_b"), partial=rows)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [C, I] -> [C, O]; the rows of expert e end at `ends[e]`."""
        output = super().forward(x, ends)
        if self.lora_a is None or self.lora_b is None:
            return output
        return torch.add(output, self.lora_b(self.lora_a(x, ends), ends), alpha=self.lora_scale)


class _GroupedMatmul(torch.autograd.Function):
    """x W + b / ranks. Saves the rows, where W is trained, and the parameter itself. The gradient of an expert without rows is zeros; that
    of b is divided by `sums`; the ranks of `summed` add up that of W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, ranks: int, sums: int, summed: Group | None
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight, ends)
        ctx.gradients, ctx.parameter = open_weight_gradients(weight), weight
        ctx.sums, ctx.summed = sums, summed
        output = grouped_matmul(x, weight, ends)
        if bias is not None:
            experts = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)  # [C]
            output.add_(bias[experts], alpha=1 / ranks)
        return as_output(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        bias_grad = grouped_sum(grad, ends) / ctx.sums if ctx.needs_input_grad[2] else None
        weight_grad, summed = None, ctx.summed
        if ctx.gradients is not None:
            x = x.detach()  # without the graph behind it
            ctx.gradients.defer([ctx.parameter], lambda: [_summed_weight_gradient(x, grad, ends, summed)], [x, grad, ends])
        elif ctx.needs_input_grad[1]:
            weight_grad = _summed_weight_gradient(x, grad, ends, summed)
        return grouped_matmul(grad, weight.mT, ends), weight_grad, bias_grad, None, None, None, None


def _summed_weight_gradient(x: Tensor, grad: Tensor, ends: Tensor, group: Group | None) -> Tensor:
    """Return the gradient of each expert's matrix, added up over the ranks of `group`."""
    gradient = grouped_weight_gradient(x, grad, ends)
    return gradient if group is None else all_reduce(gradient, group)


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row of x [C, I] by the matrix of its expert, of weight [E, I, O]: [C, O]."""
    if _has_fused_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=ends.int()) if len(x) else x.new_empty(0, weight.shape[2])
    output = x.new_empty(x.shape[0], weight.shape[2])
    for expert, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(x[first:last], weight[expert], out=output[first:last])
    return output


def grouped_weight_gradient(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient [E, I, O] of each expert's matrix, from its rows x [C, I] and their output's gradient [C, O]."""
    if _has_fused_kernel(x, grad):
        if not len(x):
            return x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
        return F.grouped_mm(x.transpose(0, 1), grad, offs=ends.int())
    weight_grad = x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])
    for expert, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        torch.mm(x[first:last].mT, grad[first:last], out=weight_grad[expert])
    return weight_grad


def grouped_sum(x: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each expert's rows of x [C, O]: [E, O]. A product with ones is deterministic, unlike an indexed sum."""
    if _has_fused_kernel(x, x):
        return grouped_weight_gradient(x.new_ones(len(x), 8), x, ends)[:, 0]
    return torch.stack([x[first:last].sum(0) for first, last in pairwise([0, *ends.tolist()])])


def _has_fused_kernel(x: Tensor, other: Tensor) -> bool:
    """Whether one kernel multiplies for all experts: on a GPU, in bf16, with rows of a multiple of 16 bytes.

    The host then need not know how many rows each expert has. A rank that is sent none does not ask either: that would break its graph, and
    its gradients would come in another order than those of its copies, with which they are summed by order.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and other.shape[-1] % 8 == 0


def copy_rows(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Return the rows of tokens x [T, H] of the copies numbered `order` [C]: [C, H]. Copy n is of token n // copies."""
    rows: Tensor = _CopyRows.apply(x, order, copies)  # type: ignore[no-untyped-call]
    return rows


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.copies = x.shape[0], copies
        return x[order // copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _place_rows(grad, order, ctx.tokens * ctx.copies).view(ctx.tokens, ctx.copies, -1).sum(1), None, None


def combine_rows(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Return each token's sum of its copies' rows times weights [..., K]: of x [C, H], of the copies numbered `order` [C], [..., H]. It is
    no view: the tensor axis sums it in place, and fully_shard's hook on it must run all the same."""
    total: Tensor = _CombineRows.apply(x, weights, order)  # type: ignore[no-untyped-call]
    return total


class _CombineRows(torch.autograd.Function):
    """Saves the rows as they came, in the experts' order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, order)
        copies = _place_rows(x, order, weights.numel()).view(*weights.shape, -1)  # [..., K, H]
        return copies.mul_(weights.to(x.dtype).unsqueeze(-1)).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, order = ctx.saved_tensors
        copy_grads = grad.flatten(0, -2)[order // weights.shape[-1]]  # [C, H]
        weights_grad = _place_rows((copy_grads * x).sum(-1, dtype=weights.dtype), order, weights.numel())
        return copy_grads.mul_(weights.flatten()[order].to(x.dtype).unsqueeze(-1)), weights_grad.view_as(weights), None


def _place_rows(x: Tensor, order: Tensor, size: int) -> Tensor:
    """Return `size` rows with row i of x [C, ...] at index order[i], and 0 elsewhere. Unlike an indexed sum, it is deterministic."""
    rows = x.new_zeros(size, *x.shape[1:]) if len(order) < size else x.new_empty(size, *x.shape[1:])
    return rows.index_copy_(0, order, x)


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """The all-to-all of rows between the ranks of a group: `sends` and `receives` are rows to and from each rank.

    `order` [C'] sorts the received rows, which are by rank, by expert; then the rows of this rank's expert e end at `ends[e]`.
    """

    group: Group
    sends: list[int]
    receives: list[int]
    order: Tensor
    ends: Tensor  # [e]


def plan_exchange(ends: Tensor, group: Group) -> TokenExchange:
    """Tell each rank how many rows it will receive for each of its experts; the rows here of expert e end at `ends[e]`, [E]."""
    sends = ends.diff(prepend=ends.new_zeros(1)).view(group.size, -1)  # [R, e]
    receives = torch.empty_like(sends)
    dist.all_to_all_single(receives, sends.contiguous(), group=group.handle)
    experts = torch.arange(receives.shape[1], device=ends.device).repeat(group.size)  # [R e]
    sent, received = torch.stack((sends.sum(1), receives.sum(1))).tolist()  # the one wait for the device
    return TokenExchange(
        group=group,
        sends=sent,
        receives=received,
        order=experts.repeat_interleave(receives.flatten(), output_size=sum(received)).sort(stable=True).indices,
        ends=receives.sum(0).cumsum(0),
    )


def dispatch_rows(x: Tensor, exchange: TokenExchange) -> Tensor:
    """Send rows x [C, H], sorted by expert, to the ranks of their experts; return this rank's, sorted by expert, [C', H]."""
    received: Tensor = _Dispatch.apply(x, exchange)  # type: ignore[no-untyped-call]
    return received


def return_rows(x: Tensor, exchange: TokenExchange) -> Tensor:
    """Send the outputs of this rank's experts, x [C', H], back to the ranks that sent the rows: [C, H]."""
    returned: Tensor = _Return.apply(x, exchange)  # type: ignore[no-untyped-call]
    return returned


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return _to_experts(x, exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _from_experts(grad, ctx.exchange), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return as_output(_from_experts(x, exchange))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_experts(grad, ctx.exchange), None


def _to_experts(x: Tensor, exchange: TokenExchange) -> Tensor:
    received = x.new_empty(sum(exchange.receives), x.shape[1])
    dist.all_to_all_single(received, x.contiguous(), exchange.receives, exchange.sends, group=exchange.group.handle)
    return received[exchange.order]


def _from_experts(x: Tensor, exchange: TokenExchange) -> Tensor:
    returned = x.new_empty(sum(exchange.sends), x.shape[1])
    by_rank = torch.empty_like(x).index_copy_(0, exchange.order, x)
    dist.all_to_all_single(returned, by_rank, exchange.sends, exchange.receives, group=exchange.group.handle)
    return returned
