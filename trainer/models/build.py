"""Builds a run's model: parameters by the names and shapes of its op table, and their initial values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..parallel.keyed import normal
from ..spec.run import Run
from .families import FAMILIES
from .table import Parameter, named, padded

if TYPE_CHECKING:
    from .gpt.module import Transformer

DEVIATION = 0.02  # of initial weights: GPT-2, Radford et al. 2019 section 2.3
RESIDUAL = ("attention.out.weight", "mlp.down.weight")  # what adds to the residual stream: divided by sqrt(2 layers) there


def build(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None = None) -> Transformer:
    """A run's whole model, with initial values drawn from a seed; without one its weights are there to be filled."""
    table = FAMILIES[run.model.family](run.model, run.train)
    logical: Mapping[str, int] = table.sizes
    local = {**logical, "vocab": padded(run.model.vocab, run.model.vocab_multiple)}
    held: dict[str, nn.Parameter] = {}
    for parameter in named(table, range(run.model.layers)):
        tensor = torch.empty(parameter.shape(local), device=device, dtype=dtype)
        if seed is not None and device.type != "meta":
            fill(tensor, initial(parameter, logical, layers=run.model.layers, seed=seed, device=device))
        held[parameter.name] = nn.Parameter(tensor)
    made = _module(held, run)
    assert {name for name, _ in made.named_parameters()} == held.keys(), "the module and the op table name different parameters"
    return made


def trained(run: Run, *, device: torch.device, dtype: torch.dtype, seed: int | None = None) -> nn.Module:
    """What the loop trains: a run's whole model as `build` makes it, or transformers' own. Raises Unreadable."""
    if run.model.family == "hf":
        from .auto.module import causal

        return causal(run, device=device, dtype=dtype, seed=seed)
    return build(run, device=device, dtype=dtype, seed=seed)


def _module(held: Mapping[str, nn.Parameter], run: Run) -> Transformer:
    match run.model.family:
        case "gpt":
            from .gpt.module import Transformer
        case "llama":
            from .llama.module import Transformer
        case family:
            raise ValueError(f"model.family={family} has no module yet: gpt and llama have")
    return Transformer(held, run)


def initial(parameter: Parameter, logical: Mapping[str, int], *, layers: int, seed: int, device: torch.device) -> Tensor:
    """A parameter's first values, float32, in its logical shape: normal, but norms 1 and biases 0."""
    shape = parameter.shape(logical)
    if len(shape) == 1:
        return torch.zeros(shape, device=device) if parameter.name.endswith(".bias") else torch.ones(shape, device=device)
    deviation = DEVIATION / sqrt(2 * layers) if parameter.name.endswith(RESIDUAL) else DEVIATION
    return normal(seed, parameter.name, 0, prod(shape), device).view(shape).mul_(deviation)


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
