"""A causal transformer as torch modules: norms before each half of a layer, put together from what the op table holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...layers.context import Context
from ...layers.cross_entropy import IGNORED, cross_entropy
from ...layers.keyed_random import Keys
from ...layers.split_linear import Held, Region, VocabEmbedding
from ...layers.transformer import Attention, Dropout, Embedding, FeedForward, Head, angles, norm, recomputed, within
from ...spec.run import Model, Run

# B batch, S sequence, H hidden, V vocabulary


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What the layers of one micro-batch are told beside the residual stream: rotary angles, attention's mask, where each
    token's document starts [B, S], the states that dropout is keyed by [B, S] (of the stream, this rank's run of the sequence),
    who has the rest of the sequence.
    """

    rope: Tensor | None
    mask: Tensor | None
    starts: Tensor | None
    states: Tensor | None
    run_states: Tensor | None
    context: Context | None


class Attending(nn.Module):
    """The first half of a layer, x + attention(norm(x)), with the norm and the dropout of what feeds forward in the second."""

    def __init__(
        self, held: Held, model: Model, layer: int, kernel: Literal["flash", "math"], region: Region | None, *, selective: bool
    ) -> None:
        super().__init__()
        self.norm1 = norm(model, within(held, "norm1"))
        self.attention = Attention(within(held, "attention"), model, layer, kernel, region, recompute=selective)
        self.dropout1 = Dropout(model.dropout, layer, "attention.residual")
        self.norm2 = norm(model, within(held, "norm2"))
        self.dropout2 = Dropout(model.dropout, layer, "mlp.residual")

    def attended(self, x: Tensor, beside: Beside) -> Tensor:
        made = self.attention(self.norm1(x), beside.rope, beside.mask, beside.states, beside.context)
        stream: Tensor = x + self.dropout1(made, beside.run_states)  # [B, S, H]
        return stream


class Layer(Attending):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, held: Held, model: Model, layer: int, kernel: Literal["flash", "math"], region: Region | None, *, selective: bool
    ) -> None:
        super().__init__(held, model, layer, kernel, region, selective=selective)
        self.mlp = FeedForward(within(held, "mlp"), model, region)

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        x = self.attended(x, beside)
        stream: Tensor = x + self.dropout2(self.mlp(self.norm2(x)), beside.run_states)  # [B, S, H]
        return stream


class Transformer(nn.Module):
    """Tokens to the loss, or a part of the way: some of the layers, the embedding before them if `first`, the head after if `last`.

    Its parameters' names are the op table's; a tied head is the embedding's own parameter. In a `region` the tensor axis splits it;
    in a `context` the context axis splits what it computes, and S is what this rank has of the sequence.
    """

    def __init__(
        self,
        held: Held,
        run: Run,
        region: Region | None = None,
        *,
        context: Context | None = None,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        model = run.model
        self.model, self.region, self.context = model, region, context
        self.recompute = run.parallel.recompute == "full"
        self.first, self.last = first, last
        if first:
            self.embedding = VocabEmbedding(within(held, "embedding"), region)
            self.positions = Embedding(within(held, "positions")) if model.positions == "learned" else None
            self.dropout = Dropout(model.dropout, -1, "embedding")
        self.layers = nn.ModuleDict(  # by the layer's own number, which a stage of a pipeline does not start at 0
            {
                str(index): self.layer(within(held, f"layers.{index}"), run, index)
                for index in (range(model.layers) if layers is None else layers)
            }
        )
        if last:
            if model.tied and not first:
                self.embedding = VocabEmbedding(within(held, "embedding"), region)  # for its name: the head's parameter is its own
            self.norm = norm(model, within(held, "norm"))
            self.head = Head(within(held, "embedding" if model.tied else "head"), region, tied=model.tied)

    def layer(self, held: Held, run: Run, index: int) -> nn.Module:
        """One of the layers."""
        selective = run.parallel.recompute == "selective"
        return Layer(held, run.model, index, run.train.attention, self.region, selective=selective)

    def forward(
        self, tokens: Tensor, labels: Tensor, *, stream: Tensor | None = None, documents: Tensor | None = None, keys: Keys | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of the losses, how many labels count) of tokens [B, S] and labels [B, S], -100 where one doesn't.

        A part that is not the first goes on from the residual `stream` [B, S, H]; one that is not the last returns its own in the
        place of the loss. `documents` [B, S] tells each token's document by any number that changes where one ends: attention and
        learned positions stay inside it; they are the whole sequence's, whoever has it. Without `keys` there is no dropout.
        """
        x = self.hidden(tokens, documents, keys, stream)
        counted = (labels != IGNORED).sum()
        if not self.last:
            return x, counted
        return cross_entropy(self.head(x), labels, self.model.vocab, self.region), counted  # of logits [B, S, V]

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] of what follows each token, without the padded words; of a whole model."""
        logits: Tensor = self.head(self.hidden(tokens, None, None))
        return logits[..., : self.model.vocab]

    def hidden(self, tokens: Tensor, documents: Tensor | None, keys: Keys | None, stream: Tensor | None = None) -> Tensor:
        """The residual stream [B, S, H] after the layers and, of the last part, the last norm."""
        beside = self._beside(tokens, documents, keys)
        x = self._embedded(tokens, beside) if stream is None else stream
        x = self.through(x, beside)
        return self.norm(x) if self.last else x

    def through(self, x: Tensor, beside: Beside) -> Tensor:
        """The residual stream [B, S, H] after the layers."""
        for layer in self.layers.values():
            x = self.passed(layer, x, beside)
        return x

    def passed(self, layer: nn.Module, x: Tensor, beside: Beside) -> Any:
        """What a layer makes of the residual stream."""
        return recomputed(told, layer, x, beside, beside.rope, beside.mask, beside.states) if self.recompute else layer(x, beside)

    def _beside(self, tokens: Tensor, documents: Tensor | None, keys: Keys | None) -> Beside:
        model, dtype = self.model, next(self.parameters()).dtype
        rope, positions = None, self._positions(tokens)
        if model.positions == "rope":
            rope = angles(positions, model.head_dim or model.hidden // model.heads, model.rope_base, dtype)
        mask = starts = None
        if documents is not None:
            starts = started(documents)[:, positions]
            mask = apart(starts, positions, documents.shape[1], dtype)
        states = None if keys is None else keys.states
        return Beside(
            rope=rope,
            mask=mask,
            starts=starts,
            states=states,
            run_states=self.region.shard(states) if states is not None and self.region else states,
            context=self.context,
        )

    def _positions(self, tokens: Tensor) -> Tensor:
        """The positions [S] of tokens [B, S] in their sequences."""
        here = tokens.shape[1]
        if self.context is None:
            return torch.arange(here, device=tokens.device)
        return self.context.positions(here * self.context.group.size, tokens.device)

    def _embedded(self, tokens: Tensor, beside: Beside) -> Tensor:
        x = self.embedding(tokens)  # [B, S, H]; in a region this rank's run of the sequence where that is split
        if self.positions is not None:
            positions = self._positions(tokens).unsqueeze(0)  # [1, S]
            places = positions if beside.starts is None else positions - beside.starts
            x = x + self.positions(self.region.shard(places) if self.region else places)
        embedded: Tensor = self.dropout(x, beside.run_states)
        return embedded


def told(layer: nn.Module, x: Tensor, beside: Beside, *held: Tensor | None) -> Tensor:
    """A layer's forward. What it holds on to by name stands among what is kept for running it again, and is counted there."""
    made: Tensor = layer(x, beside)
    return made


def started(documents: Tensor) -> Tensor:
    """Where each token's document starts in its sequence [B, S]."""
    positions = torch.arange(documents.shape[1], device=documents.device)  # [S]
    fresh = torch.ones_like(documents, dtype=torch.bool)
    fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cummax(torch.where(fresh, positions, 0), dim=1).values


def apart(starts: Tensor, positions: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores so that a token sees itself and what precedes it in its document: [B, 1, S, keys] of 0 and -inf.

    Of tokens at `positions` [S], whose documents start at [B, S].
    """
    each = torch.arange(keys, device=starts.device)
    seen = (positions[:, None] >= each) & (starts[:, :, None] <= each)  # query row, key column
    return torch.zeros(seen.shape, dtype=dtype, device=starts.device).masked_fill_(~seen, -torch.inf).unsqueeze(1)
