"""Embedding tables, and the head that turns hidden states into logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..chunked_loss import chunked_token_losses
from ..parameters_by_prefix import Parameters
from ..tensor_parallel import TensorParallel, column_products, reduce_outputs
from ..weight_gradients import product

# B batch, S sequence, s this rank's part of it under sequence parallelism, H hidden, V vocabulary: this rank's part of it


class Embedding(nn.Module):
    """A table of vectors, one per row."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.weight = parameters["weight"]

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class VocabEmbedding(nn.Module):
    """The token embedding, its rows split over tensor-parallel ranks: each rank looks up its own rows, and the ranks add them up."""

    def __init__(self, parameters: Parameters, tp: TensorParallel | None = None) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.tp = tp

    def forward(self, indices: Tensor) -> Tensor:
        """indices [B, S] -> [B, S or s, H]."""
        if self.tp is None:
            return F.embedding(indices, self.weight)
        first = self.tp.group.rank * self.weight.shape[0]
        rows: Tensor = _Lookup.apply(indices, self.weight, first)  # type: ignore[no-untyped-call]
        return reduce_outputs(rows, self.tp)


class _Lookup(torch.autograd.Function):
    """Look up rows first, first + 1, ... of a table; 0 for an index of another rank. Saves only the indices."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.first, ctx.rows = first, weight.shape[0]
        local, elsewhere = _local_indices(indices, first, weight.shape[0])
        return F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (indices,) = ctx.saved_tensors
        local, elsewhere = _local_indices(indices, ctx.first, ctx.rows)
        own_grad = grad.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        weight_grad: Tensor = torch.ops.aten.embedding_dense_backward(own_grad, local, ctx.rows, -1, False)
        return None, weight_grad, None


def _local_indices(indices: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return (indices counted from `first`, 0 for those of other ranks; the mask of those of other ranks)."""
    local = indices - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill_(elsewhere, 0), elsewhere


class LMHead(nn.Module):
    """The logits of every token: x W, or, tied to the embedding's table E, x E^T. Given labels, the losses of those logits, computed in
    chunks of the vocabulary: here, where ZeRO-3 gathers the weight, in backward once more."""

    def __init__(
        self,
        parameters: Parameters,
        tp: TensorParallel | None,
        *,
        tied: bool,
        vocab: int = 0,
        loss_chunks: int = 1,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = parameters["weight"]
        self.tp, self.tied = tp, tied
        self.vocab, self.loss_chunks, self.z_loss = vocab, loss_chunks, z_loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x [B, S or s, H] -> [B, S, V]; with labels [B, S] the losses of tokens [B S], 0 of others."""
        if labels is not None:
            chunks, z_loss = self.loss_chunks, self.z_loss
            return chunked_token_losses(x, self.weight, labels, self.vocab, self.tp, chunks, transposed=self.tied, z_loss=z_loss)
        if self.tp is not None:
            return column_products(x, self.tp, [self.weight], [None], transposed=self.tied)[0]
        return product(x, self.weight, transposed=self.tied)
