"""Activation recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], *args: Any) -> Result:
    """Call the function and save only its arguments: backward calls it again. Keyed dropout draws the same mask both times."""
    result: Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
