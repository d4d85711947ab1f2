"""The kinds of tensors in checkpoints that several folders name; the optimizer's states have torch's names."""

from __future__ import annotations

WEIGHT = "weight"
AVERAGE = "ema"  # of the weights, which an optimizer keeps beside them (optim.ema)
