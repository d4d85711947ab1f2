"""The rates of a CPU core in a layer's training: linear layers, attention and pointwise kernels in turn, forward and backward.

One product, called again and again, finds its matrices in the cache and the core at its highest frequency. Between a layer's other
kernels, and with what autograd does around it, it reaches about two thirds of that rate in float32, and far less in bf16. All cores are
busy meanwhile, as they are with the ranks of a local run. The same kernels on a few elements take what Python and autograd take of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import LayerRates

if TYPE_CHECKING:
    import torch


class LayerSizes(NamedTuple):
    """Tokens of a micro-batch, a model's hidden size and feed-forward, the sequence and the heads of its attention."""

    rows: int
    hidden: int
    wide: int
    seq: int
    heads: int

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


SMALL_MODEL, NOTHING = LayerSizes(1024, 256, 1024, 256, 4), LayerSizes(8, 8, 8, 8, 1)
HEAD_DIM = SMALL_MODEL.head_dim
# Of a small model's linear layer, forward and backward; of its attention, of which half is computed, 2.5 times as much in backward.
LINEAR_FLOPS = 3 * 2.0 * SMALL_MODEL.rows * SMALL_MODEL.hidden * SMALL_MODEL.wide
ATTENTION_FLOPS = 0.5 * 3.5 * 4.0 * SMALL_MODEL.rows * SMALL_MODEL.seq * SMALL_MODEL.hidden
# Operators that the host dispatches in a turn: five kernels forward, and twice as many backward, and a sum.
DISPATCHED = 3 * 5 + 1


def layer_rates(dtype: torch.dtype, enough: float) -> LayerRates:
    """Measure for about `enough` seconds on this process's threads; each rate is that of the median call."""
    found = _median_seconds(_kernels(dtype, SMALL_MODEL), enough)
    return {"products": 2 * LINEAR_FLOPS / (found["up"] + found["down"]), "attention": ATTENTION_FLOPS / found["attention"]}


def dispatch_seconds(enough: float) -> float:
    """Measure for about `enough` seconds how long the host takes to dispatch one operator: Python, autograd, a call of a kernel that has
    nothing to compute."""
    import torch

    return sum(_median_seconds(_kernels(torch.float32, NOTHING), enough).values()) / DISPATCHED


def _median_seconds(kernels: Mapping[str, Callable[[], Any]], enough: float) -> dict[str, float]:
    """Call kernels in turn for about `enough` seconds, and return the seconds of each one's median call."""
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    turns, start = 0, perf_counter()
    while turns < 2 or perf_counter() - start < enough:
        for name, act in kernels.items():
            began = perf_counter()
            act()
            if turns:  # the first turn allocates
                seconds[name].append(perf_counter() - began)
        turns += 1
    return {name: median(each) for name, each in seconds.items()}


def _kernels(dtype: torch.dtype, sizes: LayerSizes) -> dict[str, Callable[[], Any]]:
    """Return the forward and backward of a layer's parts; gradients are added to those before."""
    import torch
    from torch.nn import functional

    rows, hidden, wide_hidden, seq, heads = sizes

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    stream, wide = tensor(rows, hidden), tensor(rows, wide_hidden)
    ahead, wide_ahead = tensor(rows, hidden).detach(), tensor(rows, wide_hidden).detach()
    up, up_bias, down, down_bias = tensor(wide_hidden, hidden), tensor(wide_hidden), tensor(hidden, wide_hidden), tensor(hidden)
    query, key, value = (tensor(rows // seq, seq, heads, sizes.head_dim) for _ in range(3))
    heads_ahead = tensor(rows // seq, heads, seq, sizes.head_dim).detach()

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)

    def both_ways(forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> Callable[[], None]:
        def act() -> None:
            torch.autograd.backward(forward(), gradient)

        return act

    return {
        "norm": both_ways(lambda: functional.layer_norm(stream, (hidden,)), ahead),
        "attention": both_ways(attend, heads_ahead),
        "sum": lambda: stream + ahead,
        "up": both_ways(lambda: functional.linear(stream, up, up_bias), wide_ahead),
        "activation": both_ways(lambda: functional.gelu(wide, approximate="tanh"), wide_ahead),
        "down": both_ways(lambda: functional.linear(wide, down, down_bias), ahead),
    }
