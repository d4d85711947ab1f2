"""A copy of what a rank saves in its host's memory, which a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .slices import Shard

ALIGNMENT = 64  # bytes that each tensor's place begins at a multiple of


class HostCopy:
    """The host's memory for the copy, which is kept for the next save: as many bytes as the shards have that are no copies themselves,
    pinned where they are on a GPU."""

    def __init__(self) -> None:
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    @property
    def bytes(self) -> int:
        """Its size in bytes; 0 before the first copy."""
        return self._memory.nbytes

    def take(self, shards: Iterable[Shard]) -> list[Shard]:
        """Copy the shards, and return them with the copies as their tensors; these last until the next call. The devices have done all that
        changes the shards, and the copies are complete. Shards that are copies are returned as they are."""
        given = [replace(each, tensor=each.tensor.detach()) for each in shards]
        sources = [each for each in given if not each.is_copy]
        ends = list(accumulate(_place_bytes(each.tensor) for each in sources))
        devices = {each.tensor.device for each in sources if each.tensor.is_cuda}
        if ends and ends[-1] > self.bytes:
            if self._is_pinned:
                _runtime().cudaHostUnregister(self._memory.data_ptr())
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
            self._is_pinned = bool(devices) and _pin(self._memory)
        copies = [each for each in given if each.is_copy]
        for source, end in zip(sources, ends, strict=True):
            tensor = source.tensor
            start = end - _place_bytes(tensor)
            place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(replace(source, tensor=place.copy_(tensor, non_blocking=True)))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies


def _place_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _pin(memory: Tensor) -> bool:
    """Pin memory where it is; torch's own pinned memory would be rounded up to a power of two. Return whether that worked: a copy to other
    memory is slower, and the rank's log says so."""
    status = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status == 0:
        return True
    print(f"CUDA error {status}: {memory.nbytes} bytes for copies of checkpoints can't be pinned, which makes them slower")
    with suppress(RuntimeError):  # CUDA reports the error once more, to the next kernel
        torch.zeros(1, device="cuda")
    return False


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
