"""A 64-bit checksum of a tensor's bits, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 1024  # words, each with a factor of its own
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a contiguous tensor, int64 [], on its device: the sum of its elements' bits, read as integers, each times an
    odd number that depends on its place, modulo 2^64. One flipped bit always changes it."""
    words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
    rows = words.numel() // ROW
    factors = 2 * torch.arange(ROW, device=tensor.device) + 1
    columns = words[: rows * ROW].view(rows, ROW).sum(dim=0, dtype=torch.int64)
    rest = words[rows * ROW :].long()
    return (columns * factors).sum() + (rest * factors[: rest.numel()]).sum()


def combined(checksums: Tensor) -> Tensor:
    """Return one checksum, int64 [], of several [n] in this order."""
    factors = 2 * torch.arange(checksums.numel(), device=checksums.device) + 1
    return (checksums * factors).sum()
