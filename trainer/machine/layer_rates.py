"""The rates of a CPU core in a layer's training: linear layers, attention and pointwise kernels in turn, forward and backward.

One product, called again and again, finds its matrices in the cache and the core at its highest frequency. Between a layer's other
kernels, and with what autograd does around it, it reaches about two thirds of that rate in float32, and far less in bf16. All cores are
busy meanwhile, as they are with the ranks of a local run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .cache import LayerRates

if TYPE_CHECKING:
    import torch

ROWS, HIDDEN, WIDE = 1024, 256, 1024  # tokens of a micro-batch, a small model's hidden size and feed-forward
SEQ, HEADS = 256, 4  # of the attention, so that its heads have 64 elements
HEAD_DIM = HIDDEN // HEADS
LINEAR_FLOPS = 3 * 2.0 * ROWS * HIDDEN * WIDE  # of one layer, forward and backward
ATTENTION_FLOPS = 0.5 * 3.5 * 4.0 * ROWS * SEQ * HIDDEN  # causal: half is computed; backward computes 2.5 times as much as forward


def layer_rates(dtype: torch.dtype, enough: float) -> LayerRates:
    """Measure for about `enough` seconds on this process's threads; each rate is that of the median call."""
    kernels = _kernels(dtype)
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    turns, start = 0, perf_counter()
    while turns < 2 or perf_counter() - start < enough:
        for name, act in kernels.items():
            began = perf_counter()
            act()
            if turns:  # the first turn allocates
                seconds[name].append(perf_counter() - began)
        turns += 1
    found = {name: median(each) for name, each in seconds.items()}
    return {"products": 2 * LINEAR_FLOPS / (found["up"] + found["down"]), "attention": ATTENTION_FLOPS / found["attention"]}


def _kernels(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return the forward and backward of a layer's parts; gradients are added to those before."""
    import torch
    from torch.nn import functional

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    stream, wide, ahead, wide_ahead = tensor(ROWS, HIDDEN), tensor(ROWS, WIDE), tensor(ROWS, HIDDEN).detach(), tensor(ROWS, WIDE).detach()
    up, up_bias, down, down_bias = tensor(WIDE, HIDDEN), tensor(WIDE), tensor(HIDDEN, WIDE), tensor(HIDDEN)
    query, key, value = (tensor(ROWS // SEQ, SEQ, HEADS, HEAD_DIM) for _ in range(3))
    heads_ahead = tensor(ROWS // SEQ, HEADS, SEQ, HEAD_DIM).detach()

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)

    def both_ways(forward: Callable[[], torch.Tensor], gradient: torch.Tensor) -> Callable[[], None]:
        def act() -> None:
            torch.autograd.backward(forward(), gradient)

        return act

    return {
        "norm": both_ways(lambda: functional.layer_norm(stream, (HIDDEN,)), ahead),
        "attention": both_ways(attend, heads_ahead),
        "sum": lambda: stream + ahead,
        "up": both_ways(lambda: functional.linear(stream, up, up_bias), wide_ahead),
        "activation": both_ways(lambda: functional.gelu(wide, approximate="tanh"), wide_ahead),
        "down": both_ways(lambda: functional.linear(wide, down, down_bias), ahead),
    }
