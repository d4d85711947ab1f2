"""Seconds of one op on one device: the slower of its arithmetic and its memory traffic (roofline, doi:10.1145/1498765.1498785)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from ...spec.run import Device, Precision
from .number_or_array import is_number, larger
from .precision import COMPUTES

TILE_DEPTH = 130  # inner elements that filling and draining a tile's pipeline costs
SPLIT_DEPTH = 1024  # elements that each part of a split inner dim has at least
POINTWISE_BACKWARD = 1.5  # of forward's bytes: it reads the gradient too, three tensors for two
CAST_BYTES = 5.4  # moved for each element that a product in fp8 or fp4 casts: read for its largest value and to be cast, written twice
GROUPED = 0.66  # share of a product's rate that the experts' products reach, which are many small ones in one kernel

# What our modules' kernels reach on a GPU, measured on one H200 (docs/gpu_acceptance.md); `conf/device` has what published runs of other
# frameworks ask for.
ALONE = 1.06  # of `sustained`, which the slowest of many GPUs reaches: what products of one GPU reach
OWN_STREAMING = 0.86  # share of bandwidth
OWN_FLASH, OWN_FLASH_BACKWARD = 0.60, 0.55  # shares of peak, of long sequences
FLASH_TOKENS, FLASH_BACKWARD_TOKENS = 650, 1000  # keys that a causal kernel wastes: tiles that the mask cuts, its start and its end
OWN_LAUNCH = 2e-6  # seconds a kernel
# Of these, those in which the device is idle between two kernels that follow each other: 3.8e-6 a kernel of 2.9e-6, on a V100
# (developer.nvidia.com/blog/cuda-graphs). A profiler does not count them as the kernel's.
KERNEL_GAP = 0.9e-6

# Of torch 2.13's fused attention on a CPU, in float32, of 16 to 4,096 tokens on a core of a Xeon with AVX-512: the keys that it wastes,
# those at which its rate is measured (trainer/machine/layer_rates.py), and seconds of the call for a document.
CPU_FLASH_TOKENS, CPU_FLASH_KEYS, CPU_CALL = 64, 256, 16e-6


class Tiles(NamedTuple):
    """Tiles of output that one multiprocessor computes (rows, columns) with the share of the best rate that each reaches: a smaller tile
    reads its inputs more often. `splits`: parts of a long inner dim, each of which has tiles of its own."""

    shapes: tuple[tuple[int, int, float], ...]
    splits: tuple[int, ...]


AMPERE = Tiles(((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6)), (1,))
HOPPER_FP8 = 1e15  # FLOP/s in fp8, which no GPU before Hopper reaches
# Those that cuBLAS took on an H200 too.
HOPPER = Tiles(
    (*AMPERE.shapes, (320, 128, 1.0), (128, 320, 1.0), (192, 192, 1.0), (128, 160, 0.97), (160, 128, 0.97)), (1, 2, 4)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The rates that a device reaches at one precision."""

    linear: float  # FLOP/s of linear layers
    other: float  # FLOP/s of other products
    float32: float  # FLOP/s of products in float32
    flash: float  # FLOP/s of fused attention forward
    flash_backward: float  # and backward
    flash_tokens: tuple[int, int]  # keys, forward and backward, with which attention takes twice as long as with endless ones
    flash_keys: float  # keys with which it reaches those rates
    call: float  # seconds of fused attention's call for each document
    memory: float  # bytes/s
    units: int  # multiprocessors
    is_hopper: bool  # its products have the kernels of Hopper and later
    launch: float  # seconds of a kernel's launch
    dispatch: float  # seconds in which the host dispatches an operator
    fused: bool  # pointwise operators are fused into one kernel
    is_cpu: bool  # it has no multiprocessors, among which a product's tiles are shared out
    fills_tiles: bool  # products lose nothing to tiles and waves that are not full
    casts: bool  # linear layers compute in a narrower type than activations have
    own: bool  # it runs our modules


def rates(device: Device, precision: Precision, *, fused: bool, own: bool = False, alone: bool = False) -> DeviceRates | None:
    """The rates of a device; None where its peak at this precision or its bandwidth isn't stated. `own`: those of our modules on a GPU;
    `alone`: on the only one of a run. In float32 a device whose rate is not stated has that at this precision: a plan warns of it."""
    named = COMPUTES[precision]
    peaks = [device.peak.get(each) for each in (named[0], named[-1])]  # type: ignore[call-overload]
    if None in peaks or device.bandwidth is None:
        return None
    linear, other = peaks
    is_cpu = device.kind == "cpu"
    own = own and not is_cpu
    sustained = min(1.0, device.product_share * (ALONE if own and alone else 1.0))
    flash = (OWN_FLASH, OWN_FLASH_BACKWARD) if own and "bf16" in device.peak else (device.attention_share, device.attention_share)
    return DeviceRates(
        linear=linear * sustained,
        other=other * sustained,
        float32=device.peak.get("fp32", other) * sustained,
        flash=other * flash[0],
        flash_backward=other * flash[1],
        flash_tokens=(FLASH_TOKENS, FLASH_BACKWARD_TOKENS) if own else (CPU_FLASH_TOKENS * is_cpu,) * 2,
        flash_keys=CPU_FLASH_KEYS if is_cpu else inf,
        call=CPU_CALL if is_cpu else 0.0,
        memory=device.bandwidth * (max(OWN_STREAMING, device.streaming) if own else device.streaming),
        units=device.units or 1,
        is_hopper=device.peak.get("fp8", 0.0) > HOPPER_FP8,
        launch=min(OWN_LAUNCH, device.launch) if own else device.launch,
        dispatch=device.dispatch_seconds,
        fused=fused,
        is_cpu=is_cpu,
        fills_tiles=is_cpu,
        casts=named[0] != named[-1],
        own=own,
    )


def _tile_efficiency(rows: int, columns: int, inner: int, groups: int, units: int, is_hopper: bool) -> float:
    """The share of a device that a product [rows, inner] x [inner, columns], `groups` times, keeps busy.

    The output is cut into tiles, which the multiprocessors compute in waves. The last wave and the tiles at the edges are not full (tile
    and wave quantization), and each tile has a fill and a drain along the inner dim. A long inner dim is split where few tiles would leave
    multiprocessors idle.
    """
    shapes, splits = HOPPER if is_hopper else AMPERE
    best, elements = 0.0, rows * columns * groups
    for parts in splits:
        depth = inner / parts
        filled = depth / (depth + TILE_DEPTH) * ((parts == 1) | (depth >= SPLIT_DEPTH))
        if is_number(filled) and not filled:
            break
        for tall, wide, reached in shapes:
            tiles = parts * (-(-rows // tall) * -(-columns // wide) * groups)
            waves = -(-tiles // units)
            best = larger(best, filled * reached * parts * elements / (waves * units * tall * wide))
    return best


tile_efficiency = lru_cache(maxsize=1 << 16)(_tile_efficiency)


def product_seconds(rows: int, columns: int, inner: int, groups: int, width: int, peak: float, device: DeviceRates) -> float:
    """Seconds of a matrix product, `groups` at once, of elements `width` bytes wide."""
    flops = 2.0 * rows * columns * inner * groups
    moved = width * groups * (rows * inner + inner * columns + rows * columns)
    if device.fills_tiles:  # on a CPU no loss at inner dims of 32 to 512: 81 to 108 GFLOP/s, a core of a Xeon with AVX-512
        share = 1.0
    else:
        efficiency = tile_efficiency if is_number(flops) else _tile_efficiency
        share = efficiency(rows, columns, inner, groups, device.units, device.is_hopper)
    return larger(flops / (peak * share), moved / device.memory) + device.launch


def cast_seconds(elements: int, device: DeviceRates) -> float:
    """Seconds in which a linear layer's input, or its gradient, is scaled and cast to the type that the layer computes in."""
    return elements * CAST_BYTES / device.memory + device.launch if device.casts else 0.0


def memory_seconds(moved: float, kernels: float, device: DeviceRates) -> float:
    """Seconds of kernels that only move bytes."""
    return moved / device.memory + kernels * device.launch
