"""The core of attention: values weighted by the softmax of scores, by one rank that has all of the sequence or across ranks that share it.

Across ranks, those of the context axis (trainer/layers/context.py), a core is a forward and a backward by hand: it is handed the
keys and values of the whole sequence twice, and keeps neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from .context import Context, Kept

# B batch, S sequence, s of it on this rank, A heads, N key and value heads, G = A / N, D head_dim

Grads = tuple[Tensor, ...]  # of query, key and value
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, A, S, D] by torch's fused kernels (arXiv:2307.08691)."""
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # The one fused CUDA kernel that masks, or takes float32, knows no groups.
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def weighed(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) [B, A, S, S], masked; a group's queries are rows of one product with its key head."""
    B, A, S, D = query.shape
    if mask is None:
        mask = torch.full((S, S), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    scores = (grouped(query, key) @ key.mT).view(B, A, S, -1)
    return torch.softmax(torch.add(mask, scores, alpha=D**-0.5), dim=-1)


def valued(weights: Tensor, value: Tensor) -> Tensor:
    """Values weighted [B, A, S, D], by weights [B, A, S, S]."""
    B, A, S, _ = weights.shape
    return (grouped(weights, value) @ value).view(B, A, S, -1)


def grouped(x: Tensor, key: Tensor) -> Tensor:
    """Each head's rows of x [B, A, S, ...] under the key head [B, N, ...] that serves it: [B, N, G S, ...]."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1])


class Block(NamedTuple):
    """Keys that some of this rank's queries see: all of them, or but those up to a query's own (`causal`), or as a mask says."""

    rows: slice
    keys: slice
    causal: bool
    mask: Tensor | None


class Flash:
    """By torch's fused kernel for CPUs, block by block: a block's part in the whole is known by its log-sum-exp.

    Keeps the values and a float32 a query and head. Each of this rank's two pieces of the sequence sees the keys before it in one
    block and its own in another, so that what no query sees is not computed; under a mask it sees all of them in one.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """As `Core` says."""
        values = torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)  # [B, s, A, D]
        totals = query.new_full(query.shape[:3], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))  # [B, A, s]
        for rows, keys, causal, part in self._blocks(key.shape[2], mask):
            more, total = _FLASH(query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, causal, attn_mask=part)
            _add(values[:, rows].transpose(1, 2), totals[:, :, rows], more, total)
        return values, (values, totals)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Kept) -> Grads:
        """As `Core` says."""
        grad, values, totals = grad.transpose(1, 2), kept[0].transpose(1, 2), kept[1]
        grads = tuple(torch.zeros_like(each) for each in (query, key, value))
        for rows, keys, causal, part in self._blocks(key.shape[2], mask):
            given = grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], values[:, :, rows], totals[:, :, rows]
            parts = _FLASH_BACKWARD(*given, 0.0, causal, attn_mask=part)
            for whole, where, more in zip(grads, (rows, keys, keys), parts, strict=True):
                whole[:, :, where] += more
        return grads

    def _blocks(self, seq: int, mask: Tensor | None) -> Iterator[Block]:
        for rows, span in self.context.pieces(seq):
            if mask is not None:
                keys = slice(0, span.stop)
                yield Block(rows, keys, False, mask[:, :, rows, keys])
                continue
            if span.start:
                yield Block(rows, slice(0, span.start), False, None)
            yield Block(rows, slice(span.start, span.stop), True, None)


def _add(values: Tensor, totals: Tensor, more: Tensor, total: Tensor) -> None:
    """Add a block to the values [B, A, L, D] of others in place: shares of the sum of exponentials whose logarithms are the totals."""
    every = torch.logaddexp(totals, total)
    values.copy_(values * torch.exp(totals - every).unsqueeze(-1) + more * torch.exp(total - every).unsqueeze(-1))
    totals.copy_(every)


class Fused:
    """By whichever fused kernel torch takes on a GPU. Not all of them tell their log-sum-exp, so that backward computes forward again."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """As `Core` says."""
        made = []
        for rows, span in self.context.pieces(key.shape[2]):
            keys = slice(0, span.stop)
            bias = causal_lower_right(len(span), span.stop) if mask is None else mask[:, :, rows, keys]
            made.append(flash(query[:, :, rows], key[:, :, keys], value[:, :, keys], bias).transpose(1, 2))
        return torch.cat(made, dim=1), ()

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Kept) -> Grads:
        """As `Core` says."""
        query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
        with torch.enable_grad():
            values, _ = self.forward(query, key, value, mask)
        return torch.autograd.grad(values, (query, key, value), grad)


class Scores:
    """By separate kernels. Keeps the softmax's result and, with dropout, the mask and what it leaves.

    `drawn` gives the mask [B, A, s, S] of dropout with probability p for S keys.
    """

    def __init__(self, context: Context, p: float, drawn: Callable[[int], Tensor] | None) -> None:
        self.context, self.drawn = context, drawn
        self.scale = 1.0 / (1.0 - p)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Kept]:
        """As `Core` says."""
        weights = weighed(query, key, self._causal(query, key) if mask is None else mask)  # [B, A, s, S]
        if self.drawn is None:
            return valued(weights, value).transpose(1, 2), (weights,)
        dropped = self.drawn(key.shape[2])
        left = weights.masked_fill(dropped, 0.0) * self.scale
        return valued(left, value).transpose(1, 2), (weights, dropped, left)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Kept) -> Grads:
        """As `Core` says."""
        weights, left = kept[0], kept[-1]
        rows = grouped(grad.transpose(1, 2), value)  # [B, N, G s, D]
        by_value = grouped(left, value).mT @ rows
        by_weights = (rows @ value.mT).view_as(weights)
        if len(kept) > 1:
            by_weights.masked_fill_(kept[1], 0.0).mul_(self.scale)
        by_scores = torch.ops.aten._softmax_backward_data(by_weights, weights, -1, weights.dtype).mul_(query.shape[-1] ** -0.5)
        by_scores = grouped(by_scores, key)  # [B, N, G s, S]
        return (by_scores @ key).view(query.shape), by_scores.mT @ grouped(query, key), by_value

    def _causal(self, query: Tensor, key: Tensor) -> Tensor:
        """The mask [s, S] without documents."""
        seq, device = key.shape[2], query.device
        later = self.context.positions(seq, device)[:, None] < torch.arange(seq, device=device)
        return query.new_zeros(later.shape).masked_fill_(later, -torch.inf)
