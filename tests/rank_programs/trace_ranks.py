"""Ranks of which one has a fault in one layer; RUN_DIR/spoiler names it.

The file holds {"how": FAULT, "layer": 2, "rank": 1}; the faults of `RUN_FAULTS` are on all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distrain.trainer.engines.engine import Engine
from distrain.trainer.launch.rank.channel import Channel
from distrain.trainer.layers.tensor_parallel import reduce_outputs
from distrain.trainer.layers.transformer.transformer import TransformerLayer
from distrain.trainer.loop import train
from distrain.trainer.loop.rank import run_rank


class StrongerGradient(torch.autograd.Function):
    """The identity in forward; in backward the gradient is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.01 * grad


def louder(layer: TransformerLayer) -> None:
    """The output of the feed-forward is a thousandth too large."""
    _change_output(layer.mlp, lambda output: 1.001 * output)


def steeper(layer: TransformerLayer) -> None:
    """The gradient in the attention is 1 % too large."""
    _change_output(layer.attention, StrongerGradient.apply)


def unsummed(layer: Any) -> None:
    """Attention's row-parallel product returns this rank's share instead of the sum over the tensor axis."""
    out = layer.attention.out

    def forward(x: Tensor) -> Tensor:
        product = x @ out.weight
        own_share = out.tp.shard(product.clone())
        total = reduce_outputs(product, out.tp)  # the other ranks wait for it
        output: Tensor = total + (own_share - total).detach() + out.bias
        return output

    out.forward = forward


def _change_output(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    original = module.forward
    module.forward = lambda *inputs: change(original(*inputs))


LAYER_FAULTS: dict[str, Callable[[TransformerLayer], None]] = {each.__name__: each for each in (louder, steeper, unsummed)}


def unshared() -> None:
    """Gradients of which each tensor-parallel rank has a part are not summed."""
    Engine._sum_over_tensor_axis = lambda self: None  # type: ignore[method-assign]


def faster() -> None:
    """Learning rates are 1 % too high."""
    module: Any = train
    original = module.learning_rate
    module.learning_rate = lambda *arguments: 1.01 * original(*arguments)


RUN_FAULTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (unshared, faster)}


def inject_fault(how: str, layer: int, rank: int) -> None:
    """Inject a fault into this process."""
    if how in RUN_FAULTS:
        RUN_FAULTS[how]()
    elif int(os.environ["RANK"]) == rank:
        original = TransformerLayer.__init__

        def faulty_init(self: TransformerLayer, parameters: Any, run: Any, number: int, *rest: Any, **further: Any) -> None:
            original(self, parameters, run, number, *rest, **further)
            if number == layer:
                LAYER_FAULTS[how](self)

        TransformerLayer.__init__ = faulty_init  # type: ignore[method-assign, assignment]


def run_faulty_rank(path: Path, channel: Channel) -> int:
    """Run a rank, with the fault that RUN_DIR/spoiler names, if any."""
    file = path.with_name("spoiler")
    if file.is_file():
        inject_fault(**json.loads(file.read_text()))
    return run_rank(path, channel)
