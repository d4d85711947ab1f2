"""How long one device takes for one op: the slower of its arithmetic and its memory (roofline, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..spec.run import Device, Train
from .precision import COMPUTES

# Blocks of output that one multiprocessor computes, rows x columns, and what share of the best rate each reaches:
# a smaller block reads its inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
DEPTH = 128  # inner elements that filling and draining a block's pipeline costs
POINTWISE_BACKWARD = 1.5  # a pass reads the gradient beside what forward read: three tensors for two


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches at one precision: FLOP/s of linear layers, of other products, of fused attention; bytes/s."""

    linear: float
    other: float
    flash: float
    memory: float
    units: int
    launch: float
    dispatch: float
    fused: bool


def rates(device: Device, train: Train) -> Rates | None:
    """The rates of a device; None where its peak at this precision or its bandwidth isn't stated."""
    named = COMPUTES[train.precision]
    peaks = [device.peak.get(each) for each in (named[0], named[-1])]  # type: ignore[call-overload]
    if None in peaks or device.bandwidth is None:
        return None
    linear, other = peaks
    return Rates(
        linear=linear * device.sustained,
        other=other * device.sustained,
        flash=other * device.flash,
        memory=device.bandwidth * device.streaming,
        units=device.units or 1,
        launch=device.launch,
        dispatch=device.dispatch,
        fused=train.compile,
    )


@lru_cache(maxsize=1 << 16)
def filled(rows: int, columns: int, inner: int, groups: int, units: int) -> float:
    """Share of the device that a product [rows, inner] x [inner, columns], `groups` times, keeps busy.

    Its output is cut into tiles that are dealt to the multiprocessors in waves, the last of them not full, nor are the
    tiles at its edges (tile and wave quantization); and each tile has a fill and a drain along the inner dim.
    """
    best = 0.0
    for tall, wide, reached in TILES:
        waves = -(-(-(-rows // tall) * -(-columns // wide) * groups) // units)
        best = max(best, reached * rows * columns * groups / (waves * units * tall * wide))
    return best * (inner / (inner + DEPTH))


def product_seconds(rows: int, columns: int, inner: int, groups: int, width: int, peak: float, on: Rates) -> float:
    """Seconds of a matrix product, `groups` at once, of elements `width` bytes wide."""
    flops = 2.0 * rows * columns * inner * groups
    moved = width * groups * (rows * inner + inner * columns + rows * columns)
    return max(flops / (peak * filled(rows, columns, inner, groups, on.units)), moved / on.memory) + on.launch


def moving_seconds(moved: float, kernels: float, on: Rates) -> float:
    """Seconds of kernels that do nothing but move bytes."""
    return moved / on.memory + kernels * on.launch
