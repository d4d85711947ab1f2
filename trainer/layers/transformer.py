"""The layers that families are put together from: each takes parameters that the op table named and shaped.

A matrix is [inner, outer], so that y = x W. How many heads a rank has is read off the width of its own matrices. In a `region`
heads, feed-forward and vocabulary are split over the ranks of the tensor axis; without one they are all here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..spec.run import Model
from .attention_cores import Flash, Fused, Scores, flash, valued, weighed
from .context import Context, Core, attended
from .cross_entropy import wide
from .keyed_random import dropout, dropped, mixed, word
from .split_linear import ColumnLinear, Held, Region, RowLinear, columns, split

# B batch, S sequence, H hidden, A heads, N key and value heads, G = A / N, D head_dim, F ffn, V vocabulary (padded)

Made = TypeVar("Made")

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}


def within(held: Held, part: str) -> dict[str, nn.Parameter]:
    """The parameters of one part of a layer, named as they are inside it."""
    return {name.removeprefix(f"{part}."): each for name, each in held.items() if name.startswith(f"{part}.")}


def recomputed(function: Callable[..., Made], *args: Any) -> Made:
    """The function's result, keeping its arguments alone: backward computes it again. Keyed dropout draws the same once more."""
    made: Made = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made


class Embedding(nn.Module):
    """A table of vectors, one a row."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class Head(nn.Module):
    """Logits of every word: x W, or with the embedding's own table x E^T."""

    def __init__(self, held: Held, region: Region | None, *, tied: bool) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.region, self.tied = region, tied

    def forward(self, x: Tensor) -> Tensor:
        if self.region is not None:
            return split(x, self.region, [self.weight], [None], transposed=self.tied)[0]
        return F.linear(x, self.weight) if self.tied else x @ self.weight


class LayerNorm(nn.Module):
    """(x - mean) / deviation, scaled and shifted; torch computes it in float32."""

    def __init__(self, held: Held, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = held["weight"], held["bias"]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / its root mean square, scaled; computed in float32 (arXiv:1910.07467)."""

    def __init__(self, held: Held, eps: float) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel, which saves what ours does
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RMSNorm(torch.autograd.Function):
    """Saves x as it came and a float32 a token, where autograd of its formula would save x twice in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        broad = wide(x)
        inverse = torch.rsqrt(broad.square().mean(-1, keepdim=True) + eps)  # [B, S, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (broad * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, broad = wide(x) * inverse, wide(grad)
        by_weight = (broad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        broad = broad * weight
        by_x = inverse * (broad - normed * (broad * normed).mean(-1, keepdim=True))
        return by_x.to(x.dtype), by_weight, None


def norm(model: Model, held: Held) -> nn.Module:
    """The norm that a model names."""
    match model.norm:
        case "layernorm":
            return LayerNorm(held, model.norm_eps)
        case "rmsnorm":
            return RMSNorm(held, model.norm_eps)


class Dropout(nn.Module):
    """Dropout at one site of one layer (-1: before the first), keyed by each token's state; without states there is none."""

    def __init__(self, p: float, layer: int, site: str) -> None:
        super().__init__()
        self.p, self.address = p, word(layer, site)

    def on(self, states: Tensor | None) -> bool:
        return bool(self.p) and states is not None

    def forward(self, x: Tensor, states: Tensor | None, heads: range | None = None) -> Tensor:
        """x [B, S, H] by states [B, S]; of x [B, A, S, keys] each head draws its own, by its number in the whole layer."""
        if states is None or not self.p:
            return x
        return dropout(x, self.p, self.rows(states, heads))

    def mask(self, states: Tensor, heads: range, keys: int) -> Tensor:
        """What it drops of these heads' rows of so many keys, bool [B, A, S, keys]."""
        return dropped(self.rows(states, heads), keys, self.p)

    def rows(self, states: Tensor, heads: range | None = None) -> Tensor:
        """The states of rows [B, S], or of each head's [B, A, S]."""
        rows = mixed(states + self.address)
        if heads is None:
            return rows
        numbers = torch.arange(heads.start + 1, heads.stop + 1, device=states.device)[:, None]  # [A, 1]
        return mixed(rows[:, None] + numbers * self.address)


def angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions for heads of a dtype, float32 at least: [2, S, D/2] (arXiv:2104.09864)."""
    broad = torch.promote_types(dtype, torch.float32)
    turns = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=broad) / head_dim)  # [D/2]
    angle = positions.to(broad)[:, None] * turns  # [S, D/2]
    return torch.stack((angle.cos(), angle.sin()))


def turned(x: Tensor, rope: Tensor) -> Tensor:
    """Each head's pair (i, i + D/2) of x [B, S, A, D] turned by its position's angle, in float32."""
    cos, sin = rope.unsqueeze(2).unbind(0)  # [S, 1, D/2]
    first, second = wide(x).chunk(2, dim=-1)  # [B, S, A, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which key and value heads serve groups of query heads (arXiv:2305.13245).

    Attention dropout takes the plain path: a fused kernel's can't be keyed.
    """

    def __init__(
        self, held: Held, model: Model, layer: int, kernel: Literal["flash", "math"], region: Region | None, *, recompute: bool
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = (ColumnLinear(within(held, part), region) for part in ("query", "key", "value"))
        self.out = RowLinear(within(held, "out"), region)
        self.first_head, self.no_heads = (region.first_head, region.no_heads) if region else (0, 0)
        self.dropout = Dropout(model.dropout, layer, "attention")
        self.head_dim = model.head_dim or model.hidden // model.heads
        self.kernel, self.recompute = kernel, recompute

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, states: Tensor | None, context: Context | None = None) -> Tensor:
        """x [B, S, H] -> the same, of this rank's tokens where the ranks of a `context` share the sequence."""
        parts = columns(x, self.query, self.key, self.value)
        query, key, value = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in parts)  # [B, S, A or N, D]
        if rope is not None:
            query, key = turned(query, rope), turned(key, rope)
        if context is not None:
            values = self.across(query, key, value, mask, states, context)  # [B, S, A, D]
        else:
            core = partial(recomputed, self.core) if self.recompute else self.core
            values = core(query, key, value, mask, states)
        if self.no_heads:  # what is no head sees the heads that it shares with its neighbours: none of that may be learnt from
            values = F.pad(values[:, :, : -self.no_heads], (0, 0, 0, self.no_heads))
        made: Tensor = self.out(values.flatten(2))  # [B, S, H]
        return made

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, states: Tensor | None) -> Tensor:
        """What selective recomputation runs again: values [B, S, A, D] weighted by the scores."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, A or N, S, D]
        if self.kernel == "flash" and not self.dropout.on(states):
            return flash(query, key, value, mask).transpose(1, 2)
        scores = weighed(query, key, mask)  # [B, A, S, S]
        return valued(self.dropout(scores, states, self._heads(query)), value).transpose(1, 2)

    def across(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, states: Tensor | None, context: Context) -> Tensor:
        """The same where ranks share the sequence; under selective recomputation the core's own backward makes it again."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        core: Core
        if self.kernel == "flash" and not self.dropout.on(states):
            core = Fused(context) if query.is_cuda else Flash(context)
        else:
            drawn = None if states is None or not self.dropout.p else partial(self.dropout.mask, states, self._heads(query))
            core = Scores(context, self.dropout.p, drawn)
        return attended(query, key, value, mask, core, context, again=self.recompute)

    def _heads(self, query: Tensor) -> range:
        """The numbers of this rank's query heads, of query [B, A, S, D]."""
        return range(self.first_head, self.first_head + query.shape[1])


class FeedForward(nn.Module):
    """Two products around an activation; where there is a gate, it is activated and multiplies (arXiv:2002.05202)."""

    def __init__(self, held: Held, model: Model, region: Region | None) -> None:
        super().__init__()
        self.gate = ColumnLinear(within(held, "gate"), region) if "gate.weight" in held else None
        self.up, self.down = ColumnLinear(within(held, "up"), region), RowLinear(within(held, "down"), region)
        self.act = ACTS[model.act]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            broad = self.act(self.up(x))  # [B, S, F]
        else:
            gate, up = columns(x, self.gate, self.up)
            broad = self.act(gate) * up
        made: Tensor = self.down(broad)
        return made
