"""A causal transformer as torch modules: norms before each half of a layer, put together from what the op table holds."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ...parallel.keyed import Keys
from ...spec.run import Model, Run
from ..layers import IGNORED, Attention, Dropout, Embedding, FeedForward, Head, Held, angles, cross_entropy, norm, recomputed, within

# B batch, S sequence, H hidden, V vocabulary


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, held: Held, model: Model, layer: int, kernel: Literal["flash", "math"], *, selective: bool) -> None:
        super().__init__()
        self.norm1 = norm(model, within(held, "norm1"))
        self.attention = Attention(within(held, "attention"), model, layer, kernel, recompute=selective)
        self.dropout1 = Dropout(model.dropout, layer, "attention.residual")
        self.norm2 = norm(model, within(held, "norm2"))
        self.mlp = FeedForward(within(held, "mlp"), model)
        self.dropout2 = Dropout(model.dropout, layer, "mlp.residual")

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, states: Tensor | None) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x), rope, mask, states), states)  # [B, S, H]
        stream: Tensor = x + self.dropout2(self.mlp(self.norm2(x)), states)  # [B, S, H]
        return stream


class Transformer(nn.Module):
    """Tokens to the loss. Its parameters' names and shapes are the op table's; a tied head is the embedding's own parameter."""

    def __init__(self, held: Held, run: Run) -> None:
        super().__init__()
        model, recompute = run.model, run.parallel.recompute
        self.model = model
        self.recompute = recompute == "full"
        self.embedding = Embedding(within(held, "embedding"))
        self.positions = Embedding(within(held, "positions")) if model.positions == "learned" else None
        self.dropout = Dropout(model.dropout, -1, "embedding")
        self.layers = nn.ModuleDict(  # by the layer's own number, which a stage of a pipeline does not start at 0
            {
                str(index): Layer(within(held, f"layers.{index}"), model, index, run.train.attention, selective=recompute == "selective")
                for index in range(model.layers)
            }
        )
        self.norm = norm(model, within(held, "norm"))
        self.head = Head(within(held, "embedding" if model.tied else "head"), tied=model.tied)

    def forward(
        self, tokens: Tensor, labels: Tensor, *, documents: Tensor | None = None, keys: Keys | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of the losses, how many labels count) of tokens [B, S] and labels [B, S], -100 where one doesn't.

        `documents` [B, S] tells each token's document by any number that changes where one ends: attention and learned
        positions stay inside it. Without `keys` there is no dropout.
        """
        logits = self.head(self.hidden(tokens, documents, keys))  # [B, S, V]
        return cross_entropy(logits, labels, self.model.vocab), (labels != IGNORED).sum()

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of what follows each token, without the padded words."""
        logits: Tensor = self.head(self.hidden(tokens, None, None))
        return logits[..., : self.model.vocab]

    def hidden(self, tokens: Tensor, documents: Tensor | None, keys: Keys | None) -> Tensor:
        """The residual stream [B, S, H] after the last norm."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [S]
        x = self.embedding(tokens)
        rope = mask = None
        states = None if keys is None else keys.states
        if documents is not None:
            starts = started(documents)
            mask = apart(starts, x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions if documents is None else positions - starts)
        elif self.model.positions == "rope":
            rope = angles(positions, self.model.head_dim or self.model.hidden // self.model.heads, self.model.rope_base, x.dtype)
        x = self.dropout(x, states)
        for layer in self.layers.values():
            x = recomputed(layer, x, rope, mask, states) if self.recompute else layer(x, rope, mask, states)
        normed: Tensor = self.norm(x)
        return normed


def started(documents: Tensor) -> Tensor:
    """Where each token's document starts in its sequence [B, S]."""
    positions = torch.arange(documents.shape[1], device=documents.device)  # [S]
    fresh = torch.ones_like(documents, dtype=torch.bool)
    fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cummax(torch.where(fresh, positions, 0), dim=1).values


def apart(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that a token sees itself and what precedes it in its document: [B, 1, S, S] of 0 and -inf."""
    positions = torch.arange(starts.shape[1], device=starts.device)  # [S]
    seen = (positions[:, None] >= positions) & (starts[:, :, None] <= positions)  # query row, key column
    return torch.zeros(seen.shape, dtype=dtype, device=starts.device).masked_fill_(~seen, -torch.inf).unsqueeze(1)
