"""What DeepSpeed 0.19 offloads to the host: bytes held there, copies, and what its optimizer's step reads and writes, by its source
(runtime/zero/stage_1_and_2.py and stage3.py, ops/csrc/includes/cpu_adam.h)."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.run import Offload
from ..costs.offload import TO_DEVICE, TO_HOST, GradientCopies, HostBytes, HostWork, pinned_bytes
from ..costs.precision import MASTER_BYTES
from .defaults import SUBGROUP
from .flat_tensors import FlatElements
from .memory import ZeroBytes, ZeroSetting


def host_bytes(setting: ZeroSetting, flat: FlatElements, largest: int, states: ZeroBytes, offload: Offload, *, pins: bool) -> HostBytes:
    """Return what the rank that holds most has on its host. Gradients are there in float32, and in their own type as they accumulate: at
    ZeRO 2 of whole parameters, which overlap the rank's part of the flat tensors. ZeRO 1 and 2 cast stepped weights into a buffer, and
    copy gradients through one of the `largest` parameter's elements. `pins`: torch's allocator pins memory."""
    size = pinned_bytes if pins else int
    weights = size(states.weights) if offload.parameters else 0
    if not offload.optimizer:
        return HostBytes(weights=weights)
    is_stage3, accumulates = setting.stage == 3, setting.stage == 2 and setting.micros > 1 and not _is_wide(setting)
    stepped = flat.stage3 if is_stage3 else flat.part
    own = size(stepped * setting.gradient) if is_stage3 else flat.count_overlapping() * setting.gradient if accumulates else 0
    groups, rest = divmod(stepped, SUBGROUP) if is_stage3 else (0, stepped)  # each is a block of its own
    master = stepped * MASTER_BYTES if is_stage3 else size(stepped * MASTER_BYTES)
    return HostBytes(
        weights=weights,
        gradients=groups * size(SUBGROUP * MASTER_BYTES) + size(rest * MASTER_BYTES) + own,
        optimizer=master + stepped * setting.states,
        buffers=0 if is_stage3 else size(stepped * setting.weight) + size(largest * setting.weight),
    )


def gradients_on_device(setting: ZeroSetting, gradients: int) -> int:
    """Return the bytes of gradients that stay on the device beside an offloaded optimizer: those that ZeRO 1 accumulates until it reduces
    them, and a part that accumulates in float32."""
    stays = _is_wide(setting) or (setting.stage == 1 and setting.micros > 1)
    return gradients if stays else 0


def gradient_copies(stage: int, micros: int, *, weight: int, gradient: int) -> Iterator[GradientCopies]:
    """Yield the copies of gradients under backward. The last pass casts them to float32 on the device and copies those. Where ZeRO 2
    accumulates over micro-batches, and always at ZeRO 3, each pass copies them in their own type, and fetches what there was before."""
    yield GradientCopies(TO_HOST, MASTER_BYTES, 1)
    if gradient > weight or (stage == 2 and micros == 1) or stage == 1:
        return
    yield GradientCopies(TO_HOST, gradient, micros)
    yield GradientCopies(TO_DEVICE, gradient, micros if stage == 3 else micros - 1)


def host_step(stage: int, stepped: int, *, weight: int, states: int, weights_on_host: bool) -> HostWork:
    """Return the step of a rank's `stepped` elements: it clips float32 gradients, steps, and casts the weights, each over all of them, and
    then copies them."""
    clip, cast = 2 * MASTER_BYTES, MASTER_BYTES + weight
    adam = MASTER_BYTES + 2 * (MASTER_BYTES + states)
    return HostWork(stepped * (clip + adam + cast), to_device=0 if stage == 3 and weights_on_host else stepped * weight)


def _is_wide(setting: ZeroSetting) -> bool:
    """Whether gradients accumulate in a wider type than weights: on the device."""
    return setting.gradient > setting.weight
