"""Builds a run's model: parameters by the names and shapes of its op table, and their initial values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..layers.keyed_random import normal_block
from ..spec.run import Run
from .families import FAMILIES
from .table import Parameter, named, padded

if TYPE_CHECKING:
    from ..layers.context import Context
    from ..layers.group import Group
    from ..layers.split_linear import Region
    from .gpt.module import Transformer

DEVIATION = 0.02  # of initial weights: GPT-2, Radford et al. 2019 section 2.3
# What adds to the residual stream: divided by sqrt(2 layers) there.
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")


def build(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None = None) -> Transformer:
    """A run's whole model, with initial values drawn from a seed; without one its weights are there to be filled."""
    table = FAMILIES[run.model.family](run.model, run.train)
    logical: Mapping[str, int] = table.sizes
    local = {**logical, "vocab": padded(run.model.vocab, run.model.vocab_multiple)}
    held: dict[str, nn.Parameter] = {}
    for parameter in named(table, range(run.model.layers)):
        tensor = torch.empty(parameter.shape(local), device=device, dtype=dtype)
        if seed is not None and device.type != "meta":
            shape = parameter.shape(logical)
            fill(tensor, initial(parameter.name, shape, (0,) * len(shape), shape, layers=run.model.layers, seed=seed, device=device))
        held[parameter.name] = nn.Parameter(tensor)
    made = module_of(held, run)
    assert {name for name, _ in made.named_parameters()} == held.keys(), "the module and the op table name different parameters"
    return made


def module_of(
    held: Mapping[str, nn.Parameter],
    run: Run,
    region: Region | None = None,
    *,
    context: Context | None = None,
    experts: Group | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> Transformer:
    """The module of a run's family around parameters by their logical names: the whole model, or a part of it."""
    match run.model.family:
        case "gpt":
            from .gpt.module import Transformer
        case "llama":
            from .llama.module import Transformer
        case "moe":
            from .moe.module import Transformer as Mixture

            return Mixture(held, run, region, experts=experts, context=context, layers=layers, first=first, last=last)
        case family:
            raise ValueError(f"model.family={family} has no module yet: gpt, llama and moe have")
    return Transformer(held, run, region, context=context, layers=layers, first=first, last=last)


Sizes = tuple[int, ...]


def initial(name: str, shape: Sizes, offset: Sizes, size: Sizes, *, layers: int, seed: int, device: torch.device) -> Tensor:
    """First values, float32, of the block of `size` at `offset` of a weight of logical `shape`: normal, but norms 1 and biases 0."""
    if len(shape) == 1:
        return torch.zeros(size, device=device) if name.endswith(".bias") else torch.ones(size, device=device)
    deviation = DEVIATION / sqrt(2 * layers) if name.endswith(RESIDUAL) else DEVIATION
    return normal_block(seed, name, shape, offset, size, device).mul_(deviation)


def fill(held: Tensor, logical: Tensor) -> None:
    """Copy a logical tensor into one whose vocabulary is padded: what is beyond it becomes 0."""
    with torch.no_grad():
        held.zero_()
        held[tuple(slice(size) for size in logical.shape)].copy_(logical)


def unpadded(held: Tensor, parameter: Parameter, logical: Mapping[str, int]) -> Tensor:
    """The logical part of a padded tensor, as a view."""
    return held.detach()[tuple(slice(size) for size in parameter.shape(logical))]


def weights(module: nn.Module, run: Run) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a whole model by its logical name, in the table's order and its logical shape: views of the parameters."""
    held = dict(module.named_parameters())
    table = FAMILIES[run.model.family](run.model, run.train)
    for parameter in named(table, range(run.model.layers)):
        yield parameter.name, unpadded(held[parameter.name], parameter, table.sizes)


def load(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill a whole model with weights by their logical names; raises KeyError where one is missing."""
    held = dict(module.named_parameters())
    for name, tensor in tensors:
        fill(held.pop(name), tensor)
    if held:
        raise KeyError(f"no weights for {', '.join(held)}")
