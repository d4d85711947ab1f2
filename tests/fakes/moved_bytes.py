"""What torch's kernels read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MovedBytes(TorchDispatchMode):
    """Counts the kernels of its body, and the bytes that they read and write: of a product that is added to another tensor than its result,
    which torch copies first, two kernels."""

    VIEWS = ("view", "permute", "transpose", "unsqueeze", "squeeze", "select", "slice", "detach", "expand", "unbind", "alias", "split")

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.kernels = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._overloadpacket.__name__
        if name in self.VIEWS or name.startswith(("empty", "new_empty", "_unsafe_view")) or not isinstance(out, torch.Tensor):
            return out
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if name == "copy_" and given[0].data_ptr() == given[1].data_ptr():
            return out
        copied = name == "baddbmm" and out.data_ptr() != given[0].data_ptr()
        self.kernels += 1 + copied
        written = [out] * (name != "copy_") + [out, out] * copied
        self.bytes += sum(min(each.numel() * each.element_size(), each.untyped_storage().nbytes()) for each in (*given, *written))
        return out
