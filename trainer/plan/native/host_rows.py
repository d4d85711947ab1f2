"""Weights of engine `native` that are in the host's memory at ZeRO 3."""

from __future__ import annotations

GRADIENTS_AT_ONCE = 2**27  # elements of gradients that go to the host through one buffer before they are added to their sums
