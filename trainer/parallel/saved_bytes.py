"""Bytes that a forward pass saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

UNCHECKED = "_tensors_no_vc_check"


class SavedTensors:
    """The storages that autograd saves. One that several tensors share counts once, and only while it is alive."""

    def __init__(self) -> None:
        self._rows: dict[Any, tuple[int, str]] = {}

    def add(self, tensor: Tensor, reference: Any) -> None:
        """Count a tensor's storage, to which `reference` is a reference."""
        if reference not in self._rows:
            self._rows[reference] = (tensor.untyped_storage().nbytes(), f"{tensor.dtype} {list(tensor.shape)}")

    @property
    def rows(self) -> list[tuple[int, str]]:
        """(bytes, type and shape of the first tensor) of each storage that is still alive, in the order of saving."""
        return [row for reference, row in self._rows.items() if not reference.expired()]

    @property
    def bytes(self) -> int:
        """Bytes of the storages that are still alive."""
        return sum(size for size, _ in self.rows)

    def storages_except(self, others: set[Any]) -> dict[Any, int]:
        """Bytes of the storages that are still alive by their references, except those in `others`, such as weights that were gathered
        meanwhile."""
        self._rows = {reference: row for reference, row in self._rows.items() if not reference.expired()}
        return {reference: size for reference, (size, _) in self._rows.items() if reference not in others}


@contextmanager
def count_saved_tensors(*alive: Iterable[Tensor]) -> Iterator[SavedTensors]:
    """Count the tensors saved in its body, except `alive`, which live anyway: parameters, tokens, labels, keys.

    A recomputed block counts with its inputs. Read the count before backward, which frees what it has used.
    """
    saved = SavedTensors()
    living = storage_references(chain.from_iterable(alive))

    def pack(tensor: Tensor) -> Tensor:
        if (reference := _reference(tensor)) not in living:
            saved.add(tensor, reference)
        return tensor.detach()  # the tensor itself would hold the graph that holds it

    with saved_tensors_hooks(pack, lambda tensor: tensor), _unchecked_tensors(pack):
        yield saved


@contextmanager
def _unchecked_tensors(see: Callable[[Tensor], object]) -> Iterator[None]:
    """Show what compiled graphs save in the body past autograd's hooks: intermediate results that a custom backward of theirs reads, views
    of what its forward saved (torch/_functorch/_aot_autograd/runtime_wrappers.py; torch 2.13 keeps them as an attribute of the node)."""
    before = FunctionCtx.__dict__.get(UNCHECKED)

    def keep(node: Any, tensors: Iterable[Tensor]) -> None:
        node.__dict__[UNCHECKED] = tensors
        for tensor in tensors:
            see(tensor)

    setattr(FunctionCtx, UNCHECKED, property(lambda node: node.__dict__[UNCHECKED], keep))
    try:
        yield
    finally:
        delattr(FunctionCtx, UNCHECKED)
        if before is not None:
            setattr(FunctionCtx, UNCHECKED, before)


def storage_references(tensors: Iterable[Tensor]) -> set[Any]:
    """Weak references to the storages of tensors."""
    return {_reference(tensor) for tensor in tensors}


def storage_bytes(tensors: Iterable[Tensor]) -> dict[Any, int]:
    """Bytes of the storages of tensors by their references."""
    return {_reference(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _reference(tensor: Tensor) -> Any:
    """A weak reference to the storage; while it exists, no other storage gets the same address."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
