"""Finds the tensor in which a layout first departs from one process, among the differences that its ranks recorded in traced steps."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

TensorKind = Literal["weight", "output", "output_gradient", "gradient"]

# In the order of a step: weights at its start, outputs, output gradients from the last module to the first, and the gradients of
# the weights as the optimizer receives them.
TENSOR_KINDS: tuple[TensorKind, ...] = ("weight", "output", "output_gradient", "gradient")
NORM_READERS = {"norm1": "attention", "norm2": "mlp", "norm": "head"}  # the only reader of each norm's output makes its gradient
MODEL_PARTS = ("embedding", "positions", "dropout")  # before the layers, in the order of computation
LAYER_PARTS = (  # in the order of computation; "" is the layer itself
    "norm1", "attention.dropout", "attention", "post_norm1", "dropout1",
    "norm2", "mlp", "router", "experts", "shared", "post_norm2", "dropout2", "",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoundingLimits:
    """The differences that rounding explains.

    For outputs and gradients: the largest difference as a share of the largest number, in the first step and in later ones, when
    Adam has made steps out of rounding where a gradient is almost 0. For weights: the mean difference as a share of the learning
    rates added up.
    """

    first_step: float
    later_steps: float
    weights: float


FLOAT32_LIMITS = RoundingLimits(first_step=5e-5, later_steps=1e-3, weights=2e-3)
HALF_LIMITS = RoundingLimits(first_step=0.05, later_steps=0.15, weights=0.3)
INT8_LIMITS = RoundingLimits(first_step=5e-5, later_steps=0.15, weights=inf)  # moments in 8 bits are in other blocks on other ranks


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


def first_departure(differences: Iterable[TensorDifference], precision: str, moments: str = "fp32") -> TensorDifference | None:
    """The first computed of all ranks' differences that rounding does not explain; None if rounding explains all."""
    limits = HALF_LIMITS if precision != "fp32" else INT8_LIMITS if moments == "int8" else FLOAT32_LIMITS

    def limit(each: TensorDifference) -> float:
        return limits.weights if each.kind == "weight" else limits.later_steps if each.step else limits.first_step

    return min((each for each in differences if not each.share <= limit(each)), key=computation_order, default=None)


def computation_order(each: TensorDifference) -> tuple[int, int, int, Sequence[int], int]:
    """Sort key by time of computation. All forward passes come before all backward passes, which only depend on them."""
    position = module_position(each.name)
    ordered = tuple(-number for number in position) if each.kind == "output_gradient" else position
    return each.step, TENSOR_KINDS.index(each.kind), each.micro, ordered, each.rank


def module_position(name: str) -> tuple[int, int, int]:
    """Where a module, or a weight's module, stands between tokens and loss: (layer or group of layers, layer in the group, part of the
    layer). A group stands behind its layers."""
    top, *parts = name.split(".")
    if top == "layers":
        group, *parts = parts
        in_group, parts = (int(parts[0]), parts[1:]) if parts and parts[0].isdecimal() else (1 << 30, parts)
        part = next((each for each in (".".join(parts[:2]), *parts[:1]) if each in LAYER_PARTS), "other" if parts else "")
        return int(group), in_group, LAYER_PARTS.index(part) if part in LAYER_PARTS else len(LAYER_PARTS)
    return (-1, 0, MODEL_PARTS.index(top)) if top in MODEL_PARTS else (1 << 30, 0, int(top == "head"))


def departure_sentence(each: TensorDifference, traced: Iterable[TensorDifference] = ()) -> str:
    """A difference in words: `step 3, micro-batch 1, layers.2.attention on rank 5 (dp 1 tp 0): its output differs ...`.

    `traced` are all that were recorded: they say which steps lie before it, and of what the model is made.
    """
    where = f"{each.name} on rank {each.rank}{f' ({each.place})' if each.place else ''}"
    size = f"by {each.apart:.1e} (largest value {each.scale:.2g})"
    recorded = list(traced)
    match each.kind:
        case "weight":
            differs = f"it differs from the reference by {each.apart:.1e} on average"
            return f"{_weight_time(each, recorded)}, {where}: {differs}; {_before(each, recorded)}"
        case "gradient":
            return f"step {each.step + 1}, {where}: its gradient differs from the reference {size}"
    when = f"step {each.step + 1}, micro-batch {each.micro + 1}"
    if each.kind == "output":
        return f"{when}, {where}: its output differs from the reference {size}"
    layer, _, part = each.name.rpartition(".")
    reader = _norm_reader(layer, part, recorded) if part in NORM_READERS else ""
    says = f" (computed by {layer}{'.' * bool(layer)}{reader} in backward)" if reader else ""
    return f"{when}, {where}: the gradient of its output{says} differs from the reference {size}"


def agreement(differences: Iterable[TensorDifference], step: int, kinds: Container[TensorKind]) -> float:
    """The largest share by which tensors of these kinds differ in a step (from 0)."""
    return max((each.share for each in differences if each.step == step and each.kind in kinds), default=0.0)


def _norm_reader(layer: str, part: str, recorded: Sequence[TensorDifference]) -> str:
    """What reads a norm's output: in a mixture of experts the router and the experts."""
    is_mixture = part == "norm2" and any(each.name == f"{layer}.router" for each in recorded)
    return "router and experts" if is_mixture else NORM_READERS[part]


def _untraced_before(each: TensorDifference, recorded: Sequence[TensorDifference]) -> bool:
    """Whether the step that made a weight was not traced."""
    return bool(recorded) and each.step > 0 and each.step - 1 not in {other.step for other in recorded if other.kind != "weight"}


def _weight_time(each: TensorDifference, recorded: Sequence[TensorDifference]) -> str:
    if not each.step:
        return "before the first step"
    return f"by the end of step {each.step}" if _untraced_before(each, recorded) else f"after step {each.step}"


def _before(each: TensorDifference, recorded: Sequence[TensorDifference]) -> str:
    """What agrees before a weight that differs."""
    if not _untraced_before(each, recorded):
        return "everything computed before agrees"
    last = max(other.step for other in recorded if other.step < each.step and other.kind != "weight")
    between = f"steps {last + 2} to {each.step} are" if last + 2 < each.step else f"step {each.step} is"
    return f"{between} not traced, and everything in step {last + 1} agrees"
