"""Seconds of one op on one device: the slower of its arithmetic and its memory traffic (roofline, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...spec.run import Device, Precision
from .number_or_array import is_number, larger
from .precision import COMPUTES

# Tiles of output that one multiprocessor computes (rows, columns) and the share of the best rate that each reaches: a smaller tile reads
# its inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
TILE_DEPTH = 160  # inner elements that filling and draining a tile's pipeline costs
POINTWISE_BACKWARD = 1.5  # of forward's bytes: it reads the gradient too, three tensors for two
CAST_BYTES = 5.4  # moved for each element that a product in fp8 or fp4 casts: read for its largest value and to be cast, written twice
GROUPED = 0.66  # share of a product's rate that the experts' products reach, which are many small ones in one kernel


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The rates that a device reaches at one precision."""

    linear: float  # FLOP/s of linear layers
    other: float  # FLOP/s of other products
    flash: float  # FLOP/s of fused attention
    memory: float  # bytes/s
    units: int  # multiprocessors
    launch: float  # seconds of a kernel's launch
    dispatch: float  # seconds in which the host dispatches an operator
    fused: bool  # pointwise operators are fused into one kernel
    even: bool  # the three products of a linear layer take equally long: a CPU has no multiprocessors that share out tiles
    casts: bool  # linear layers compute in a narrower type than activations have


def rates(device: Device, precision: Precision, *, fused: bool) -> DeviceRates | None:
    """The rates of a device; None where its peak at this precision or its bandwidth isn't stated."""
    named = COMPUTES[precision]
    peaks = [device.peak.get(each) for each in (named[0], named[-1])]  # type: ignore[call-overload]
    if None in peaks or device.bandwidth is None:
        return None
    linear, other = peaks
    return DeviceRates(
        linear=linear * device.sustained,
        other=other * device.sustained,
        flash=other * device.flash,
        memory=device.bandwidth * device.streaming,
        units=device.units or 1,
        launch=device.launch,
        dispatch=device.dispatch,
        fused=fused,
        even=device.kind == "cpu",
        casts=named[0] != named[-1],
    )


def _tile_efficiency(rows: int, columns: int, inner: int, groups: int, units: int) -> float:
    """The share of a device that a product [rows, inner] x [inner, columns], `groups` times, keeps busy.

    The output is cut into tiles, which the multiprocessors compute in waves. The last wave and the tiles at the edges are not full (tile
    and wave quantization), and each tile has a fill and a drain along the inner dim.
    """
    best = 0.0
    for tall, wide, reached in TILES:
        waves = -(-(-(-rows // tall) * -(-columns // wide) * groups) // units)
        best = larger(best, reached * rows * columns * groups / (waves * units * tall * wide))
    return best * (inner / (inner + TILE_DEPTH))


tile_efficiency = lru_cache(maxsize=1 << 16)(_tile_efficiency)


def product_seconds(rows: int, columns: int, inner: int, groups: int, width: int, peak: float, device: DeviceRates) -> float:
    """Seconds of a matrix product, `groups` at once, of elements `width` bytes wide."""
    flops = 2.0 * rows * columns * inner * groups
    moved = width * groups * (rows * inner + inner * columns + rows * columns)
    efficiency = tile_efficiency if is_number(flops) else _tile_efficiency
    return larger(flops / (peak * efficiency(rows, columns, inner, groups, device.units)), moved / device.memory) + device.launch


def cast_seconds(elements: int, device: DeviceRates) -> float:
    """Seconds in which a linear layer's input, or its gradient, is scaled and cast to the type that the layer computes in."""
    return elements * CAST_BYTES / device.memory + device.launch if device.casts else 0.0


def memory_seconds(moved: float, kernels: float, device: DeviceRates) -> float:
    """Seconds of kernels that only move bytes."""
    return moved / device.memory + kernels * device.launch
