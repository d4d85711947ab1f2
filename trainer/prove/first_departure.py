"""Finds the tensor in which a layout first departs from one process, among the differences that its ranks recorded in traced steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

TensorKind = Literal["weight", "output", "output_gradient", "gradient"]

# In the order of a step: weights at its start, outputs, output gradients from the last module to the first, and the gradients of
# the weights as the optimizer receives them.
TENSOR_KINDS: tuple[TensorKind, ...] = ("weight", "output", "output_gradient", "gradient")
NORM_READERS = {"norm1": "attention", "norm2": "mlp", "norm": "head"}  # the only reader of each norm's output makes its gradient
LAYER_PARTS = ("norm1", "attention", "norm2", "mlp", "")  # in the order of computation; "" is the layer itself


@dataclass(frozen=True, kw_only=True)
class RoundingLimits:
    """The differences that rounding explains.

    Of outputs and gradients: the largest difference as a share of the largest number, in the first step and in later ones, when
    Adam has made steps out of rounding where a gradient is almost 0. Of weights: the mean difference as a share of the learning
    rates added up.
    """

    first_step: float
    later_steps: float
    weights: float


FLOAT32_LIMITS = RoundingLimits(first_step=5e-5, later_steps=1e-3, weights=2e-3)
HALF_LIMITS = RoundingLimits(first_step=0.05, later_steps=0.1, weights=0.3)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """The difference of one rank's tensor from that of one process in step `step` (from 0).

    `apart` is the largest difference and `scale` the largest number of the reference; of a weight, `apart` is the mean difference
    and `scale` the learning rates of the steps so far added up.
    """

    step: int
    micro: int  # the micro-batch; -1 for a tensor of the whole step
    name: str  # of a module or a weight
    kind: TensorKind
    apart: float
    scale: float
    rank: int
    place: str  # the rank's mesh position: dp 1 tp 0

    @property
    def share(self) -> float:
        """The difference as a share of the scale; infinite where it is not finite."""
        if not isfinite(self.apart):
            return inf
        return self.apart / self.scale if self.scale else (inf if self.apart else 0.0)


def read_differences(rows: Iterable[Mapping[str, Any]]) -> list[TensorDifference]:
    """Read the rows of RUN_DIR/departure/N.json, which rank N wrote."""
    return [TensorDifference(**row) for row in rows]


def first_departure(differences: Iterable[TensorDifference], precision: str) -> TensorDifference | None:
    """The first computed of all ranks' differences that rounding does not explain; None if rounding explains all."""
    limits = FLOAT32_LIMITS if precision == "fp32" else HALF_LIMITS

    def limit(each: TensorDifference) -> float:
        return limits.weights if each.kind == "weight" else limits.later_steps if each.step else limits.first_step

    return min((each for each in differences if not each.share <= limit(each)), key=computation_order, default=None)


def computation_order(each: TensorDifference) -> tuple[int, int, int, Sequence[int], int]:
    """Sort key by time of computation. All forward passes come before all backward passes, which only depend on them."""
    position = module_position(each.name)
    ordered = tuple(-number for number in position) if each.kind == "output_gradient" else position
    return each.step, TENSOR_KINDS.index(each.kind), each.micro, ordered, each.rank


def module_position(name: str) -> tuple[int, int]:
    """Where a module, or a weight's module, stands between tokens and loss: (layer, part of the layer)."""
    top, *parts = name.split(".")
    if top == "layers":
        part = parts[1] if len(parts) > 1 else ""
        return int(parts[0]), LAYER_PARTS.index(part) if part in LAYER_PARTS else len(LAYER_PARTS)
    return (-1, 0) if top in ("embedding", "positions") else (1 << 30, int(top == "head"))


def departure_sentence(each: TensorDifference) -> str:
    """A difference in words: `step 3, micro-batch 1, layers.2.attention on rank 5 (dp 1 tp 0): its output differs ...`."""
    where = f"{each.name} on rank {each.rank}{f' ({each.place})' if each.place else ''}"
    size = f"by {each.apart:.1e} (largest value {each.scale:.2g})"
    match each.kind:
        case "weight":
            when = f"after step {each.step}" if each.step else "before the first step"
            return f"{when}, {where}: it differs from the reference by {each.apart:.1e} on average; everything computed before agrees"
        case "gradient":
            return f"step {each.step + 1}, {where}: its gradient differs from the reference {size}"
    when = f"step {each.step + 1}, micro-batch {each.micro + 1}"
    if each.kind == "output":
        return f"{when}, {where}: its output differs from the reference {size}"
    layer, _, part = each.name.rpartition(".")
    reader = f" (computed by {layer}{'.' * bool(layer)}{NORM_READERS[part]} in backward)" if part in NORM_READERS else ""
    return f"{when}, {where}: the gradient of its output{reader} differs from the reference {size}"
