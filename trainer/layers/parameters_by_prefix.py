"""A layer's parameters, keyed by their names inside the layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Parameters = Mapping[str, nn.Parameter]


def sub_parameters(parameters: Parameters, part: str) -> dict[str, nn.Parameter]:
    """Return the parameters of one part of a layer, keyed by their names inside the part."""
    return {name.removeprefix(f"{part}."): each for name, each in parameters.items() if name.startswith(f"{part}.")}
