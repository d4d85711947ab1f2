"""The rates of a CPU core in a layer's training: products, attention and pointwise kernels in turn.

One product, called again and again, finds its matrices in the cache and the core at its highest frequency. Between a layer's other
kernels it reaches about two thirds of that rate. All cores are busy meanwhile, as they are with the ranks of a local run.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

ROWS, HIDDEN, WIDE = 1024, 256, 1024  # of the products: tokens of a micro-batch, a small model's hidden size and feed-forward
SEQ, HEADS = 256, 4  # of the attention, so that its heads have 64 elements
HEAD_DIM = HIDDEN // HEADS
MATRICES = 4  # of each kind, used in turn, as those of several layers are


class LayerRates(NamedTuple):
    """FLOP/s in float32 of a linear layer's three products, and of causal attention forward and backward, of which half is computed."""

    products: float
    attention: float


def layer_rates(enough: float) -> LayerRates:
    """Measure for about `enough` seconds on this process's threads; each rate is that of the median call."""
    products, attention = 2.0 * ROWS * HIDDEN * WIDE, 0.5 * 3.5 * 4.0 * ROWS * SEQ * HIDDEN
    kernels = _kernels()
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    turns, start = 0, perf_counter()
    while turns < 2 or perf_counter() - start < enough:
        for name, act in kernels.items():
            began = perf_counter()
            act(turns % MATRICES)
            if turns:  # the first turn allocates
                seconds[name].append(perf_counter() - began)
        turns += 1
    found = {name: median(each) for name, each in seconds.items()}
    return LayerRates(3 * products / sum(found[name] for name in ("forward", "input", "weight")), attention / found["attention"])


def _kernels() -> dict[str, Callable[[int], Any]]:
    """Return the kernels of a layer in the order in which they run, each called with the number of its matrices."""
    import torch
    from torch.nn import functional

    def matrices(rows: int, columns: int) -> list[Tensor]:
        return [torch.randn(rows, columns) for _ in range(MATRICES)]

    streams, wides, weights = matrices(ROWS, HIDDEN), matrices(ROWS, WIDE), matrices(WIDE, HIDDEN)
    narrow, wide = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(ROWS, WIDE, requires_grad=True)
    heads = [torch.randn(ROWS // SEQ, SEQ, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    ahead = torch.randn(ROWS // SEQ, HEADS, SEQ, HEAD_DIM)

    def attend(at: int) -> object:
        query, key, value = (each.transpose(1, 2) for each in heads)
        return torch.autograd.grad(functional.scaled_dot_product_attention(query, key, value, is_causal=True), heads, ahead)

    return {
        "norm": lambda at: torch.autograd.grad(functional.layer_norm(narrow, (HIDDEN,)), narrow, streams[at]),
        "forward": lambda at: streams[at] @ weights[at].t(),
        "attention": attend,
        "activation": lambda at: torch.autograd.grad(functional.gelu(wide, approximate="tanh"), wide, wides[at]),
        "input": lambda at: wides[at] @ weights[at],
        "sum": lambda at: streams[at] + narrow,
        "weight": lambda at: wides[at].t() @ streams[at],
    }
