"""Mixtral's kind as torch modules: a transformer whose layers send each token to some of many feed-forwards (arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...layers.cross_entropy import IGNORED, wide
from ...layers.experts import ExpertLinear, back, combined, copied, there, trip
from ...layers.group import Group
from ...layers.keyed_random import Keys
from ...layers.split_linear import Held, Region, f, g
from ...layers.transformer import ACTS, FeedForward, within
from ...spec.run import Run
from ..gpt.module import Attending, Beside
from ..gpt.module import Transformer as Dense
from .routing import Routing, imbalance, near_ties, routed

# B batch, S sequence, H hidden, E experts, K experts of a token, C copies of tokens that are computed, F expert_ffn


class Router(nn.Module):
    """Each expert's logit of each token, in float32."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, E]."""
        logits: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return logits


class _Product(torch.autograd.Function):
    """x W in float32; saves x as it came, where autograd would save it in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide(x) @ wide(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        by_weight = wide(x).flatten(0, -2).mT @ grad.flatten(0, -2)
        return (grad @ wide(weight).mT).to(x.dtype), by_weight.to(weight.dtype)


class Experts(nn.Module):
    """Gated feed-forwards side by side, each of which takes the tokens that chose it; all of a token's are added up.

    The ranks of a `group` have as many of them each, and rows travel.
    """

    def __init__(self, held: Held, act: str, group: Group | None) -> None:
        super().__init__()
        self.gate, self.up, self.down = (ExpertLinear(within(held, part)) for part in ("gate", "up", "down"))
        self.act, self.group = ACTS[act], group

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x [B, S, H] -> [B, S, H]; in a region this rank's part of the sum."""
        rows = copied(x.flatten(0, 1), routing.order, routing.weights.shape[-1])  # [C, H]
        if self.group is None:
            made = self.fed(rows, routing.ends)
        else:
            by = trip(routing.ends, self.group)
            made = back(self.fed(there(rows, by), by.ends), by)
        return combined(made, routing.weights.flatten(0, 1), routing.order).view_as(x)

    def fed(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows [C, H] each through its expert, of which those of e end at `ends[e]`."""
        broad = self.act(self.gate(rows, ends)) * self.up(rows, ends)  # [C, F]
        made: Tensor = self.down(broad, ends)
        return made


class Layer(Attending):
    """x + attention(norm(x)), then x + the experts that norm(x) chose of it, and those that every token has."""

    def __init__(self, held: Held, run: Run, layer: int, region: Region | None, experts: Group | None) -> None:
        model, train = run.model, run.train
        super().__init__(held, model, layer, train.attention, region, selective=run.parallel.recompute == "selective")
        self.router = Router(within(held, "router"))
        self.experts = Experts(within(held, "experts"), model.act, experts)
        self.shared = FeedForward(within(held, "shared"), model, region) if model.shared_experts else None
        self.region, self.top_k, self.balances = region, model.top_k, model.aux_loss > 0
        self.room = None if model.capacity is None else int(model.capacity * model.top_k * train.seq / model.experts)

    def forward(self, x: Tensor, beside: Beside) -> tuple[Tensor, Tensor | None, Tensor]:
        """(the residual stream [B, S, H], how uneven routing was in each sequence [B] where that is asked, near ties)."""
        x = self.attended(x, beside)
        normed = self.norm2(x)
        mixed, uneven, close = self.mixed(normed)
        if self.shared is not None:
            mixed = mixed + self.shared(normed)
        return x + self.dropout2(mixed, beside.run_states), uneven, close

    def mixed(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """What a token's experts make of it, [B, S, H] (of the stream), how uneven routing was, near ties.

        In a region all ranks route all tokens alike: logits and tokens enter it whole.
        """
        logits = self.router(x)
        if self.region is not None:
            logits, x = f(logits, self.region), f(x, self.region)
        routing = routed(logits, self.top_k, self.room)
        made = self.experts(x, routing)
        uneven = imbalance(logits, routing.chosen) if self.balances else None
        return (made if self.region is None else g(made, self.region)), uneven, near_ties(logits, self.top_k, x.dtype)


class Transformer(Dense):
    """A transformer of such layers. What `model.aux_loss` adds is in the gradients, not in the loss that is returned.

    A part that is not the last has no loss whose gradient it could see: it is told that, `loss_gradient`, before its backward.
    """

    def __init__(self, held: Held, run: Run, region: Region | None = None, *, experts: Group | None = None, **part: Any) -> None:
        self.experts = experts  # who has the others
        super().__init__(held, run, region, **part)
        self.loss_gradient = 1.0
        self.uneven: list[Tensor] = []  # of the layers of a forward under way, [B] each
        self.near_ties: list[Tensor] = []  # of the layers of all training forwards since somebody took them

    def layer(self, held: Held, run: Run, index: int) -> nn.Module:
        return Layer(held, run, index, self.region, self.experts)

    def forward(
        self, tokens: Tensor, labels: Tensor, *, stream: Tensor | None = None, documents: Tensor | None = None, keys: Keys | None = None
    ) -> tuple[Tensor, Tensor]:
        """As a dense one's. Each sequence's unevenness, summed over layers, is weighted by how many of its labels count: what the
        gradient sees is the sum of losses plus aux_loss times their sum, so that the mean over labels is one of each."""
        out, counted = super().forward(tokens, labels, stream=stream, documents=documents, keys=keys)
        uneven, self.uneven = self.uneven, []
        if uneven:
            ranks = self.region.group.size if self.region else 1  # each computes all of it, and their gradients add up
            weighed = (torch.stack(uneven).sum(0) * (labels != IGNORED).sum(1)).sum() * (self.model.aux_loss / ranks)
            out = _Beside.apply(out, weighed, None if self.last else self.loss_gradient)  # type: ignore[no-untyped-call]
        return out, counted

    def through(self, x: Tensor, beside: Beside) -> Tensor:
        self.uneven = []
        for layer in self.layers.values():
            x, uneven, close = self.passed(layer, x, beside)
            if self.training:
                self.near_ties.append(close)
            if uneven is not None:
                self.uneven.append(uneven)
        return x


class _Beside(torch.autograd.Function):
    """The loss, or a residual stream, as it is; what is beside it gets the loss's gradient, or the one that is told."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, beside: Tensor, told: float | None) -> Tensor:
        ctx.told, ctx.dtype = told, beside.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        beside = grad.to(ctx.dtype) if ctx.told is None else grad.new_full((), ctx.told, dtype=ctx.dtype)
        return grad, beside, None
