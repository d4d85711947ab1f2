"""The layers that families are put together from: each takes parameters that the op table named and shaped.

A matrix is [inner, outer], so that y = x W. How many heads a rank has is read off the width of its own matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..parallel.keyed import dropout, mixed, word
from ..spec.run import Model

# B batch, S sequence, H hidden, A heads, N key and value heads, G = A / N, D head_dim, F ffn, V vocabulary (padded)

IGNORED = -100  # a label that does not count
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits that are float32 at once: what stays in a cache, what fills a GPU

Held = Mapping[str, nn.Parameter]  # a layer's parameters by their names inside it

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


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """The function's result, keeping its arguments alone: backward computes it again. Keyed dropout draws the same once more."""
    made: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made


class Embedding(nn.Module):
    """A table of vectors, one a row."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


class Linear(nn.Module):
    """x W + b. What is saved for backward is the parameter, never a view of it: ZeRO-3 lets go of its memory in between."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.bias = held.get("bias")

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Head(nn.Module):
    """Logits of every word: x W, or with the embedding's own table x E^T."""

    def __init__(self, held: Held, *, tied: bool) -> None:
        super().__init__()
        self.weight = held["weight"]
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
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
        wide = _wide(x)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [B, S, 1]
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, wide = _wide(x) * inverse, _wide(grad)
        by_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        wide = wide * weight
        by_x = inverse * (wide - normed * (wide * normed).mean(-1, keepdim=True))
        return by_x.to(x.dtype), by_weight, None


def _wide(x: Tensor) -> Tensor:
    """In float32, or wider where it was."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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

    def forward(self, x: Tensor, states: Tensor | None) -> Tensor:
        """x [B, S, H] by states [B, S]; of x [B, A, S, keys] each head draws its own."""
        if states is None or not self.p:
            return x
        rows = mixed(states + self.address)  # [B, S]
        if x.dim() == 4:
            heads = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # [A, 1]
            rows = mixed(rows[:, None] + heads * self.address)  # [B, A, S]
        return dropout(x, self.p, rows)


def angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary positions for heads of a dtype, float32 at least: [2, S, D/2] (arXiv:2104.09864)."""
    wide = torch.promote_types(dtype, torch.float32)
    turns = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim)  # [D/2]
    angle = positions.to(wide)[:, None] * turns  # [S, D/2]
    return torch.stack((angle.cos(), angle.sin()))


def turned(x: Tensor, rope: Tensor) -> Tensor:
    """Each head's pair (i, i + D/2) of x [B, S, A, D] turned by its position's angle, in float32."""
    cos, sin = rope.unsqueeze(2).unbind(0)  # [S, 1, D/2]
    first, second = _wide(x).chunk(2, dim=-1)  # [B, S, A, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which key and value heads serve groups of query heads (arXiv:2305.13245).

    Attention dropout takes the plain path: a fused kernel's can't be keyed.
    """

    def __init__(self, held: Held, model: Model, layer: int, kernel: Literal["flash", "math"], *, recompute: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (Linear(within(held, part)) for part in ("query", "key", "value", "out"))
        self.dropout = Dropout(model.dropout, layer, "attention")
        self.head_dim = model.head_dim or model.hidden // model.heads
        self.kernel, self.recompute = kernel, recompute

    def forward(self, x: Tensor, rope: Tensor | None, mask: Tensor | None, states: Tensor | None) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.query, self.key, self.value))  # [B, S, A or N, D]
        if rope is not None:
            query, key = turned(query, rope), turned(key, rope)
        core = partial(recomputed, self.core) if self.recompute else self.core
        made: Tensor = self.out(core(query, key, value, mask, states).flatten(2))  # [B, S, H]
        return made

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, states: Tensor | None) -> Tensor:
        """What selective recomputation runs again: values [B, S, A, D] weighted by the scores."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, A or N, S, D]
        if self.kernel == "flash" and not self.dropout.on(states):
            return flash(query, key, value, mask).transpose(1, 2)
        scores = weighed(query, key, mask)  # [B, A, S, S]
        return valued(self.dropout(scores, states), value).transpose(1, 2)


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
    rows = query.reshape(B, key.shape[1], -1, D)  # [B, N, G S, D]
    scores = (rows @ key.mT).view(B, A, S, -1)
    return torch.softmax(torch.add(mask, scores, alpha=D**-0.5), dim=-1)


def valued(weights: Tensor, value: Tensor) -> Tensor:
    """Values weighted [B, A, S, D], by weights [B, A, S, S]."""
    B, A, S, _ = weights.shape
    rows = weights.reshape(B, value.shape[1], -1, value.shape[2])  # [B, N, G S, S]
    return (rows @ value).view(B, A, S, -1)


class FeedForward(nn.Module):
    """Two products around an activation; where there is a gate, it is activated and multiplies (arXiv:2002.05202)."""

    def __init__(self, held: Held, model: Model) -> None:
        super().__init__()
        self.gate = Linear(within(held, "gate")) if "gate.weight" in held else None
        self.up, self.down = Linear(within(held, "up")), Linear(within(held, "down"))
        self.act = ACTS[model.act]

    def forward(self, x: Tensor) -> Tensor:
        wide = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)  # [B, S, F]
        made: Tensor = self.down(wide)
        return made


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """The sum over labels [B, S] that count of -log softmax(logits [B, S, V]), of the first `vocab` words; float32."""
    loss: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they came, and widens some rows at a time: never a float32 copy of them all, nor their softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.vocab = vocab
        loss = _wide(logits.new_zeros(()))
        for rows in _chunks(logits):
            loss = loss + F.cross_entropy(_wide(logits[rows, :vocab]), labels[rows], ignore_index=IGNORED, reduction="sum")
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        by_logits = torch.zeros_like(logits) if ctx.vocab < logits.shape[1] else torch.empty_like(logits)
        for rows in _chunks(logits):
            label = labels[rows, None]  # [rows, 1]
            counts = label != IGNORED
            each = torch.softmax(_wide(logits[rows, : ctx.vocab]), dim=-1)
            each.scatter_add_(1, label.clamp(min=0), -torch.ones_like(label, dtype=each.dtype))
            by_logits[rows, : ctx.vocab] = each.mul_(counts * grad)
        return by_logits, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """The rows of logits [B S, V], few enough at a time."""
    rows = max(1, _CHUNK.get(logits.device.type, 1 << 26) // logits.shape[1])
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]
