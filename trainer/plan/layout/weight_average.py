"""The average of the weights that an optimizer keeps beside them (optim.ema)."""

from __future__ import annotations

AVERAGE = "ema"  # its kind in checkpoints
