"""What a module's forwards leave in one of its lists, for those who call the module to take."""

from __future__ import annotations

from typing import Any

from torch import nn


def take_held(module: nn.Module, name: str) -> list[Any]:
    """Return what the module's list of this name has received since it was last taken, and empty it; none where it has no such list."""
    held: list[Any] = getattr(module, name, [])
    taken = list(held)
    held.clear()
    return taken
