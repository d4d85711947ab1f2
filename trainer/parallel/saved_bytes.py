"""Counts what a forward pass saves for backward, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Saved:
    """The storages that autograd has saved: each once, however many tensors share it, and while it is held."""

    def __init__(self) -> None:
        self._rows: dict[Any, tuple[int, str]] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage."""
        storage = tensor.untyped_storage()
        self._rows.setdefault(_reference(tensor), (storage.nbytes(), f"{tensor.dtype} {list(tensor.shape)}"))

    @property
    def rows(self) -> list[tuple[int, str]]:
        """(bytes, type and shape of the first tensor) of each storage that is still held, in the order of saving."""
        return [row for reference, row in self._rows.items() if not reference.expired()]

    @property
    def bytes(self) -> int:
        """Bytes that are still held."""
        return sum(size for size, _ in self.rows)

    def beside(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that are still held, but for what these tensors hold, such as weights that were gathered on the way."""
        others = {_reference(tensor) for tensor in tensors}
        return sum(size for reference, (size, _) in self._rows.items() if not reference.expired() and reference not in others)


@contextmanager
def counted(*alive: Iterable[Tensor]) -> Iterator[Saved]:
    """Counts the tensors saved in its body, but for those that live anyway: parameters, tokens, labels, keys.

    A recomputed part counts with what it is computed from. Read it before backward, which lets go of what it has used.
    """
    saved = Saved()
    living = {_reference(tensor) for tensors in alive for tensor in tensors}

    def pack(tensor: Tensor) -> Tensor:
        if _reference(tensor) not in living:
            saved.add(tensor)
        return tensor.detach()  # itself would hold the graph that holds it

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _reference(tensor: Tensor) -> Any:
    """The storage by identity, not kept alive: its address is not given to another while this is held."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
