"""Copies between a device and its host, beside what the device computes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class CopyStream:
    """Copies in one direction between a device and its host, one after the other, beside what the device computes. Where the device is a
    CPU, each is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.bytes = 0  # copied so far

    def wait_for_device(self) -> None:
        """Have the copies to come wait for the work that the device has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Begin copies, each given as where to and where from. Return their end; None: they are done."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for into, source in pairs:
                self.bytes += source.nbytes
                into.copy_(source, non_blocking=self._stream is not None)
                if source.is_cuda:  # the device may free it before the copy has ended
                    source.record_stream(self._stream)
            end: torch.cuda.Event | None = self._stream.record_event() if self._stream is not None else None
        return end


def wait_for_copies(end: torch.cuda.Event | None) -> None:
    """Have the host wait until copies that `CopyStream.begin` began are done."""
    if end is not None:
        end.synchronize()


def wait_for_device(device: torch.device) -> None:
    """Have the host wait for all work that a device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
