"""The fork server of the product, run by path: the ranks of a run whose folder has a file `spoiler` go wrong as that says.

The file holds {"how": name, "layer": 2, "rank": 1}: of that layer of the model, on that rank.
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
from distrain.trainer.launch.rank.channel import Talk
from distrain.trainer.layers.split_linear import g
from distrain.trainer.loop import train
from distrain.trainer.loop.forkserver.server import QUESTIONS, serve
from distrain.trainer.loop.rank import run_rank
from distrain.trainer.models.gpt.module import Layer


class Stronger(torch.autograd.Function):
    """Nothing in forward; in backward a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 1.01 * grad


def louder(layer: Layer) -> None:
    """The feed-forward's output is a thousandth too large."""
    _after(layer.mlp, lambda made: 1.001 * made)


def steeper(layer: Layer) -> None:
    """The attention's gradient is 1 % too large."""
    _after(layer.attention, Stronger.apply)


def unsummed(layer: Any) -> None:
    """Attention's row product hands on its own share, where the sum over the tensor axis belongs."""
    out = layer.attention.out

    def forward(x: Tensor) -> Tensor:
        made = x @ out.weight
        mine = out.region.shard(made.clone())
        made = g(made, out.region)  # others wait for it
        added: Tensor = made + (mine - made).detach() + out.bias
        return added

    out.forward = forward


def _after(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    right = module.forward
    module.forward = lambda *given: change(right(*given))


IN_A_LAYER: dict[str, Callable[[Layer], None]] = {each.__name__: each for each in (louder, steeper, unsummed)}


def unshared() -> None:
    """Gradients of which each tensor rank has a part are not added up."""
    Engine._sum_shared = lambda self: None  # type: ignore[method-assign]


def faster() -> None:
    """Learning rates are 1 % too high."""
    module: Any = train
    right = module.rate
    module.rate = lambda *of: 1.01 * right(*of)


IN_A_RUN: dict[str, Callable[[], None]] = {each.__name__: each for each in (unshared, faster)}


def spoil(how: str, layer: int, rank: int) -> None:
    if how in IN_A_RUN:
        IN_A_RUN[how]()
    elif int(os.environ["RANK"]) == rank:
        right = Layer.__init__

        def wrong(self: Layer, held: Any, model: Any, number: int, *rest: Any, **further: Any) -> None:
            right(self, held, model, number, *rest, **further)
            if number == layer:
                IN_A_LAYER[how](self)

        Layer.__init__ = wrong  # type: ignore[method-assign, assignment]


def spoiled(path: Path, talk: Talk) -> int:
    """What a rank does, spoiled first where that is asked for."""
    asked = path.with_name("spoiler")
    if asked.is_file():
        spoil(**json.loads(asked.read_text()))
    return run_rank(path, talk)


if __name__ == "__main__":
    serve(spoiled, QUESTIONS)
