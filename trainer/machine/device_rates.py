"""What torch alone reaches on a device: rates of a matrix product and of a copy, the time of a launch, the CUDA context.

`seconds_of` times a call: see `device_seconds.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAUNCHES = 2000  # tiny kernels in a row

SecondsOf = Callable[[Callable[[], object]], float]


def product_rate(device: torch.device, dtype: torch.dtype, side: int, seconds_of: SecondsOf) -> float:
    """FLOP/s of a product of two square matrices."""
    import torch

    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 / seconds_of(lambda: torch.mm(one, other))


def copy_rate(device: torch.device, size: int, seconds_of: SecondsOf) -> float:
    """Bytes/s of a copy of `size` bytes, read and written."""
    import torch

    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2.0 * size / seconds_of(lambda: target.copy_(source))


def launch_seconds(device: torch.device, seconds_of: SecondsOf) -> float:
    """Seconds of an op that computes nothing to speak of, one of many in a row."""
    import torch

    x = torch.zeros(8, device=device)

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            x.add_(1.0)

    return seconds_of(launch_all) / LAUNCHES


def context_bytes() -> int:
    """Return what the driver and torch's libraries hold of the GPU beside torch's allocator; another program's share counts too."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())
