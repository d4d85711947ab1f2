"""Bytes that are alive on a device, counted at every operator."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

BLOCK = 512  # bytes by which CUDA's caching allocator rounds (kMinBlockSize of c10/core/CachingDeviceAllocator.h)
# Operators that compute nothing: they allocate, or give memory another shape.
# fmt: off
NO_KERNEL = frozenset((
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "_reshape_alias", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view", "_unsafe_view",
))
# fmt: on


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages on a device that operators of its body make, while they are alive, and the kernels that those launch.

    `block`: bytes to which each storage is rounded up.
    """

    def __init__(self, device: str, *, block: int = BLOCK) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.kernels = 0
        self.peak_operator = ""
        self._device, self._block = device, block
        self._sizes: dict[int, int] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made outside."""
        for tensor in tensors:
            self._add(tensor)

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def count_again(self, storage: UntypedStorage) -> None:
        """Count a storage that was made larger or smaller since it was counted."""
        if (key := storage._cdata) in self._sizes:
            size = -(-storage.nbytes() // self._block) * self._block
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            if self.now > self.peak:
                self.peak, self.peak_operator = self.now, "resize_"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels += func.namespace != "c10d" and func._overloadpacket.__name__ not in NO_KERNEL
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                self._add(each)
        if self.now > self.peak:
            self.peak, self.peak_operator = self.now, str(func)
        return result

    def _add(self, tensor: Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a sharded tensor is as large as all of its shards
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = -(-storage.nbytes() // self._block) * self._block
        self.now += self._sizes[key]
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def storage_bytes(tensors: Iterable[Tensor], block: int = BLOCK) -> int:
    """Return the bytes of the storages of tensors, each once and rounded up."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(-(-size // block) * block for size in storages.values())
