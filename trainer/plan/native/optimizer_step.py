"""The optimizer's step of engine `native`: what it reads and writes on the device, or on the host, where pieces of buckets are stepped one
after the other (trainer/engines/native/host_optimizer.py)."""

from __future__ import annotations

from ...spec.run import Run
from ...spec.sections.optimizer import Optim
from ..costs.cost_context import CostContext
from ..costs.muon import MUON
from ..costs.offload import HostBytes, HostWork, pinned_bytes
from ..costs.precision import MASTER_BYTES, average_bytes, has_moments

PIECE = 2**24  # elements of a bucket's shard that are copied to the host, stepped and copied back in turn
PARTS = {"cpu": 2**16, "cuda": 2**24}  # elements of bf16 and int8 moments that are in float32 at once where no kernel steps them, by device
# Steps of AdamW with float32 moments that take as long as one with moments in bf16 or in 8 bits on a CPU (scripts/bench_moments.py, one
# core of an AMD EPYC: 0.55 ns an element; 4.4, 1.5 and 8.7, 3.2, 0.95 and 4.3).
ROUNDED_STEPS = {
    ("adamw", "stochastic"): 8.0,
    ("adamw", "nearest"): 2.8,
    ("adamw", "int8"): 16.5,
    ("sgd", "stochastic"): 5.8,
    ("sgd", "nearest"): 1.7,
    ("sgd", "int8"): 8.0,
}
# Bytes of an element that is quantized: its share of the scale, its code and the bound beside it, in 4 bytes each, and whether it is above.
QUANTIZING_BYTES = 13
AT_HAND = 2  # neighbouring pieces that are being copied or stepped at once: each has memory of its own on the host


def steps_in_one_kernel(run: Run) -> bool:
    """Whether one kernel steps a bucket: AdamW on a GPU, also beside Muon."""
    return run.cluster.device.kind == "cuda" and run.optim.name in ("adamw", MUON)


def stepped_at_once(device: str) -> int:
    """The elements whose moments in bf16 or in 8 bits are widened, stepped and rounded at once on a kind of device."""
    return PARTS.get(device, PARTS["cpu"])


def rounding_of(optim: Optim) -> str:
    """How moments that are not float32 are rounded: stochastic, nearest, or int8."""
    return optim.moments if optim.moments == "int8" else optim.rounding


def rounded_step_moves(run: Run) -> float | None:
    """Return the bytes of each element in the time of whose moves a CPU takes a step with moments in bf16 or in 8 bits; None: it takes that
    of its own moves. A processor computes longer on their bits than it moves them: so many steps of AdamW in float32, as measured. Steps of
    Muon's matrices, and those on the host of a GPU, are counted by their moves alone."""
    key = run.optim.name, rounding_of(run.optim)
    if run.cluster.device.kind != "cpu" or run.optim.moments == "fp32" or key not in ROUNDED_STEPS:
        return None
    return ROUNDED_STEPS[key] * step_moves(MASTER_BYTES, MASTER_BYTES, 2 * MASTER_BYTES, one_kernel=False)


def part_bytes(run: Run, stepped: int, *, casts: bool) -> int:
    """Return the bytes that a step of moments in bf16 or in 8 bits holds for a moment: of a part of `stepped` elements the moments in
    float32, what they are rounded with (random bits and what these are mixed with), and gradients, where it `casts` them. A kernel holds
    none, but steps no matrices of Muon."""
    one_kernel, optim = steps_in_one_kernel(run), run.optim
    if not has_moments(optim) or (one_kernel and optim.name != MUON):
        return 0
    moments = 1 if one_kernel or optim.name == "sgd" else 2
    rounded_with = {"stochastic": 3 * MASTER_BYTES, "nearest": 0, "int8": QUANTIZING_BYTES}[rounding_of(optim)]
    each = (moments + (casts and not one_kernel)) * MASTER_BYTES + rounded_with
    return each * min(stepped_at_once(run.cluster.device.kind), stepped)


def cast_bytes(run: Run, bucket: int, stepped: int, *, casts: bool) -> int:
    """Return the bytes that a step of `stepped` elements holds for a moment in float32: gradients of a bucket, where it `casts` them, or a
    part of moments in bf16 or in 8 bits."""
    if run.optim.moments != "fp32":
        return part_bytes(run, stepped, casts=casts)
    return min(bucket, stepped) * MASTER_BYTES if casts and not steps_in_one_kernel(run) else 0


def step_moves(weight: int, gradient: int, states: float, *, one_kernel: bool) -> float:
    """Return the bytes that a step reads and writes for each element, with weights, gradients and optimizer states of these bytes.

    The norm reads the gradient. One kernel reads it again, in its own type, and writes a narrower weight too; without one the gradient is
    cast before AdamW, which writes it too, and the weight copied after it.
    """
    if one_kernel:
        return 2 * gradient + 2 * (MASTER_BYTES + states) + (weight if weight < MASTER_BYTES else 0)
    cast = gradient + MASTER_BYTES if gradient < MASTER_BYTES else 0
    copied = MASTER_BYTES + weight if weight < MASTER_BYTES else 0
    return gradient + cast + 2 * (MASTER_BYTES + MASTER_BYTES + states) + copied


def bucket_work(context: CostContext, stepped: int, gradient: int) -> HostWork:
    """Return the step of a rank's `stepped` elements with gradients of so many bytes. Pieces of buckets are copied, stepped and copied back
    in turn; parts of them are cast in a processor's cache. An average of the weights reads these once more."""
    width, average = context.widths, average_bytes(context.run.optim)
    each = gradient + width.weight
    moved = 2 * (MASTER_BYTES + context.states) + average + each
    return HostWork(stepped * moved, stepped * gradient, stepped * width.weight, exposed=min(PIECE, stepped) * each)


def bucket_host_bytes(context: CostContext, optimizer: int, stepped: int, gradient: int) -> HostBytes:
    """Return what is on the host beside `optimizer` bytes of states of `stepped` elements: gradients, of so many bytes, and weights of the
    pieces at hand."""
    size = pinned_bytes if context.run.cluster.device.kind == "cuda" else int
    piece = min(PIECE, stepped)
    return HostBytes(optimizer=optimizer, buffers=AT_HAND * sum(size(piece * each) for each in (gradient, context.widths.weight)))
