"""Bytes that a training step holds on this rank, by kind; each storage is counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..parallel.saved_bytes import SavedTensors, count_saved_tensors, storage_bytes, storage_references
from ..plan.costs.offload import pinned_bytes

HELD_KINDS = ("weights", "optimizer", "gradients", "buffers", "host")  # host: what is not on the device but in its host's memory


class ByteCounter:
    """Bytes of one step by kind: the most activations after any of its forward passes, and of its backwards that defer products; the rest
    after a backward pass."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.gathered: Sequence[Tensor] = ()  # weights that are not whole but while they are computed with: no activations
        self._saved: list[SavedTensors] = []

    @contextmanager
    def count_forward(self, modules: Sequence[nn.Module], *inputs: Any) -> Iterator[None]:
        """Count a forward pass that runs in the block: what it and earlier ones have saved and still hold, without weights and inputs."""
        with count_saved_tensors(parameters_of(modules), tensors_in(inputs)) as saved:
            yield
        self._saved.append(saved)
        self.count_activations(modules)

    def count_activations(self, modules: Sequence[nn.Module], deferred: Iterable[Tensor] = ()) -> None:
        """Count what the forwards so far have saved and still hold, and what `deferred` products hold, without weights."""
        weights = storage_references([*parameters_of(modules), *self.gathered])
        alive = {reference: size for reference, size in storage_bytes(deferred).items() if reference not in weights}
        for each in self._saved:
            alive |= each.storages_except(weights)
        self.bytes["activations"] = max(sum(alive.values()), self.bytes.get("activations", 0))

    def count_backward(self, held: Mapping[str, int]) -> None:
        """Count the bytes that the engine holds after a backward pass."""
        self.bytes |= held


def bytes_by_kind(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the bytes of (kind, tensor) rows by kind; a storage that is in several rows belongs to the first."""
    seen: set[int] = set()
    total = dict.fromkeys(HELD_KINDS, 0)
    for kind, tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[kind] += pinned_bytes(storage.nbytes()) if kind == "host" and tensor.is_pinned() else storage.nbytes()
    return total


def parameters_of(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules."""
    for module in modules:
        yield from module.parameters()


# Attributes that hold tensors: of DeepSpeed's message buckets, dropout's keys, bounds of documents, pairs of answers.
HOLDERS = ("buffer", "states", "starts", "host", "labels", "reference")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, mappings, message buckets, dropout keys, bounds of documents and pairs of answers."""
    match value:
        case None:
            return
        case Tensor():
            yield value
        case Mapping():
            for each in value.values():
                yield from tensors_in(each)
        case list() | tuple():
            for each in value:
                yield from tensors_in(each)
        case _:
            for name in HOLDERS:
                yield from tensors_in(getattr(value, name, None))
