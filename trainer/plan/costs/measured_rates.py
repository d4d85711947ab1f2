"""Figures of a device with which a plan takes the rates that were measured: the inverse of `roofline.py`.

A device's file states a peak and a bandwidth, and the shares of them that kernels reach; a plan multiplies both. A measured rate already
contains its share, so it can't stand as a peak beside the shares of another device: it would be reduced twice.
"""

from __future__ import annotations

from .op_seconds import head_dim_share
from .roofline import ALONE, HOPPER_FP8, OWN_STREAMING, tile_efficiency


def full_rate(rate: float, side: int, units: int | None, fp8_peak: float | None) -> float:
    """FLOP/s of a product whose tiles fill the device, from the rate of a square product of `side` elements."""
    return rate / tile_efficiency(side, side, side, 1, units or 1, (fp8_peak or 0.0) > HOPPER_FP8)


def sustained_share(full: float, peak: float, devices: int) -> float:
    """`sustained` of a device's file with which products are planned to reach the rate `full`: the slowest of several GPUs reaches it,
    the only one of a run ALONE times as much."""
    return min(1.0, full / (peak * (ALONE if devices == 1 else 1.0)))


def peak_estimate(full: float, sustained: float, devices: int) -> float:
    """The peak of a GPU without a data sheet: FLOP/s of which products reach `full`, if it sustains the share that others do."""
    return full / min(1.0, sustained * (ALONE if devices == 1 else 1.0))


def bandwidth_of_copy(rate: float, streaming: float) -> float:
    """`bandwidth` of a device's file with which kernels of our modules are planned to move `rate` bytes/s, as a copy does."""
    return rate / max(OWN_STREAMING, streaming)


def cpu_shares(peak: float, products: float, attention: float, head_dim: int) -> dict[str, float]:
    """`sustained` and `flash` of a CPU whose products and attention, of heads with `head_dim` elements, reach these FLOP/s in a layer's
    training, where a product alone reaches `peak`."""
    return {
        "sustained": round(min(1.0, products / peak), 3),
        "flash": round(min(1.0, attention / (peak * head_dim_share(head_dim))), 3),
    }
