"""The mesh axes that split a block's tensors, one module each, and the order in which they are asked."""

from __future__ import annotations

from . import cp, ep, tp

AXES = (tp, cp, ep)

__all__ = ["AXES"]
