"""The layers whose gradients engine `native` takes together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ...layers.transformer.transformer import Transformer
from ...spec.derived.compiled_layers import has_compiled_layers
from ...spec.run import Run


def layers_taken_together(run: Run, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of a run's parts whose gradients are taken together: those that are compiled, since their backward returns all at
    once, and the memory of one is no longer in use before the next one is computed. Layers with experts are not: their graphs may break."""
    if not has_compiled_layers(run.train, run.parallel) or run.model.experts:
        return []
    found = list[Any]()
    for module in modules:
        if isinstance(module, Transformer):
            found += [*module.layers.values(), *(each.layer for each in getattr(module, "mtp", {}).values())]
    return found
