"""Bytes of weights, gradients, optimizer states and buffers that DeepSpeed ZeRO 0.19 holds on a rank, as counted on live tensors.

They are more than the papers' stages hold. Gradients are those that exist between two micro-batches, together with activations. From the
last backward pass on the optimizer's step also holds copies of them, flat and in float32; activations are freed by then.
"""

from __future__ import annotations

from typing import NamedTuple

from ..costs.precision import MASTER_BYTES
from .defaults import LIVE
from .flat_tensors import FlatElements


class ZeroSetting(NamedTuple):
    """The settings that decide what DeepSpeed holds: ZeRO stage, data-parallel ranks, micro-batches a step, bytes an element of weights,
    gradients and optimizer states, elements of a bucket and how many it fills in turn, whether its pipeline engine runs."""

    stage: int
    ranks: int
    micros: int
    weight: int
    gradient: int
    states: int
    bucket: int
    buckets: int
    pipeline: bool


class ZeroBytes(NamedTuple):
    """Bytes on a rank."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int


def effective_stage(zero: int, *, half: bool, ep: int = 1) -> int:
    """Return the ZeRO stage that DeepSpeed runs: at least 1 in half precision and with expert parallelism (config.py says why)."""
    return max(1, zero) if half or ep > 1 else zero


class FrozenElements(NamedTuple):
    """Frozen parameters on a rank: all of them, and at ZeRO 3 its part of each. They have no master weights."""

    whole: int
    stage3: int


def zero_bytes(setting: ZeroSetting, whole: int, flat: FlatElements, frozen: FrozenElements) -> ZeroBytes:
    """Return the bytes of `whole` trained parameters, which lie in flat tensors as `flat` says, and of frozen ones."""
    match setting.stage:
        case 0:
            reduced = whole * setting.gradient if setting.ranks > 1 else 0  # all-reduced in a flat copy
            return ZeroBytes((whole + frozen.whole) * setting.weight, whole * setting.gradient, whole * setting.states, reduced)
        case 3:
            gathered = min(whole + frozen.whole, LIVE) * setting.weight if setting.ranks > 1 else 0
            part = flat.stage3
            buffers = gathered + setting.bucket * setting.weight
            return ZeroBytes(
                (part + frozen.stage3) * setting.weight, part * setting.gradient, part * (MASTER_BYTES + setting.states), buffers
            )
        case _:
            optimizer = flat.part * (MASTER_BYTES + setting.states)
            return ZeroBytes(
                (flat.whole + frozen.whole) * setting.weight, _gradients(setting, whole, flat), optimizer, _bucket(setting, whole)
            )


def step_bytes(setting: ZeroSetting, whole: int, flat: FlatElements) -> int:
    """Return the bytes that reducing gradients and stepping hold in addition, once activations are freed (scripts/trace_cuda).

    ZeRO 1 to 3 flatten a rank's gradients and cast them to float32. bf16 with float32 gradients at ZeRO 1 is another optimizer, which
    casts and flattens the gradients of the whole model when it reduces them; at ZeRO 2 they are float32 already.
    """
    wide = setting.gradient > setting.weight
    match setting.stage:
        case 0:
            return whole * setting.gradient if setting.ranks == 1 else 0  # all-reduced in a flat copy, which is a buffer of many ranks
        case 1 if wide:
            return whole * (setting.weight + setting.gradient)
        case 2 if wide:
            return flat.part
        case 3:
            return flat.stage3 * (MASTER_BYTES if setting.gradient == MASTER_BYTES else MASTER_BYTES + setting.gradient)
        case _:
            return flat.part * (MASTER_BYTES if setting.gradient == MASTER_BYTES else MASTER_BYTES + setting.gradient)


class StepWork(NamedTuple):
    """What a step costs: bytes that it moves for each parameter of a rank's part, kernels that it launches for each of its tensors."""

    moved: int
    kernels: int


_STEP_WORK = {  # of (ZeRO stage, half precision, float32 gradients), counted on DeepSpeed's own step (scripts/trace_cuda/optimizer_step.py)
    (0, False, True): StepWork(44, 0),
    (1, False, True): StepWork(80, 2),
    (2, False, True): StepWork(80, 2),
    (3, False, True): StepWork(80, 2),
    (1, True, False): StepWork(80, 16),
    (2, True, False): StepWork(80, 16),
    (3, True, False): StepWork(76, 3),
    (1, True, True): StepWork(62, 2),
    (2, True, True): StepWork(78, 15),
    (3, True, True): StepWork(78, 2),
}


def step_work(stage: int, *, weight: int, gradient: int) -> StepWork:
    """Return what DeepSpeed's step costs: norm, flat copies, casts, clipping, Adam and the new weights, each kernels of their own."""
    return _STEP_WORK[stage, weight < MASTER_BYTES, gradient == MASTER_BYTES]


def _gradients(setting: ZeroSetting, whole: int, flat: FlatElements) -> int:
    """Return the bytes of gradients at ZeRO 1 and 2.

    ZeRO 1 reduces once a step, ZeRO 2 at every micro-batch; after that a rank keeps the gradients of the parameters that overlap its
    part. Where bf16 accumulates in float32, ZeRO 1 is another optimizer, which keeps all of them, and ZeRO 2 keeps its part only. A
    pipeline reduces after the last backward pass.
    """
    wide = setting.gradient > setting.weight
    if setting.stage == 1:
        return (whole if wide or setting.pipeline or setting.micros > 1 else flat.count_overlapping()) * setting.gradient
    return (flat.part if wide else flat.count_overlapping()) * setting.gradient


def _bucket(setting: ZeroSetting, whole: int) -> int:
    """Return the bytes of the buckets that reduce gradients, allocated in full; a pipeline's bf16 optimizer copies them all, flat."""
    if setting.pipeline and setting.gradient > setting.weight:
        return whole * setting.gradient if setting.ranks > 1 else 0
    return setting.buckets * setting.bucket * setting.weight
