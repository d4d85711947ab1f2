"""Where a layout departs from one process first: what its ranks found in traced steps, in the order in which it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

Kind = Literal["weight", "output", "output_gradient", "gradient"]

# In the order of a step: weights at its start, outputs, their gradients from the last to the first, gradients of the weights as the
# optimizer takes them.
KINDS: tuple[Kind, ...] = ("weight", "output", "output_gradient", "gradient")
TAKERS = {"norm1": "attention", "norm2": "mlp", "norm": "head"}  # of what a norm puts out: they alone make its gradient
PARTS = ("norm1", "attention", "norm2", "mlp", "")  # of a layer, in the order in which they are done; the last is the layer's own


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What rounding takes a layout to: of outputs and gradients at most so much of the largest number, in the first step and later,
    when Adam has made steps of rounding where a gradient is all but 0; of weights on average so much of the learning rates added up."""

    at_first: float
    later: float
    weights: float


ROUNDING = {"fp32": Rounding(at_first=5e-5, later=1e-3, weights=2e-3)}
HALF = Rounding(at_first=0.05, later=0.1, weights=0.3)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How far a tensor of one rank is from one process's in step `step` (from 0): at most, and `scale` is the largest number of that;
    or a weight on average, and `scale` is the learning rates so far added up."""

    step: int
    micro: int  # -1: of the whole step
    name: str  # of a module, or of a weight
    kind: Kind
    apart: float
    scale: float
    rank: int
    place: str  # dp 1 tp 0

    @property
    def share(self) -> float:
        """The difference as a share of the scale."""
        if not isfinite(self.apart):
            return inf
        return self.apart / self.scale if self.scale else (inf if self.apart else 0.0)


def read(rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """One rank's findings, as it wrote them."""
    return [Finding(**row) for row in rows]


def first(findings: Iterable[Finding], precision: str) -> Finding | None:
    """The first of all ranks' findings that rounding does not explain; None where there is none."""
    rounding = ROUNDING.get(precision, HALF)

    def most(each: Finding) -> float:
        return rounding.weights if each.kind == "weight" else rounding.later if each.step else rounding.at_first

    return min((each for each in findings if not each.share <= most(each)), key=order, default=None)


def order(each: Finding) -> tuple[int, int, int, Sequence[int], int]:
    """When it is computed: all forward passes before all backward, for these go on from each other in no other way."""
    where = place_of(each.name)
    later = tuple(-number for number in where) if each.kind == "output_gradient" else where
    return each.step, KINDS.index(each.kind), each.micro, later, each.rank


def place_of(name: str) -> tuple[int, int]:
    """Where a module, or a weight's module, is on the way from tokens to loss: (layer, part of it)."""
    head, *parts = name.split(".")
    if head == "layers":
        part = parts[1] if len(parts) > 1 else ""
        return int(parts[0]), PARTS.index(part) if part in PARTS else len(PARTS)
    return (-1, 0) if head in ("embedding", "positions") else (1 << 30, int(head == "head"))


def told(each: Finding) -> str:
    """A finding as a sentence: `step 3, micro-batch 1, layers.2.attention on rank 5 (dp 1 tp 0): its output differs ...`."""
    who = f"{each.name} on rank {each.rank}{f' ({each.place})' if each.place else ''}"
    far = f"by {each.apart:.1e} of {each.scale:.2g}"
    match each.kind:
        case "weight":
            when = f"after step {each.step}" if each.step else "before the first step"
            return f"{when}, {who}: it differs from the reference by {each.apart:.1e} on average, and nothing did before"
        case "gradient":
            return f"step {each.step + 1}, {who}: its gradient differs from the reference {far}"
    when = f"step {each.step + 1}, micro-batch {each.micro + 1}"
    if each.kind == "output":
        return f"{when}, {who}: its output differs from the reference {far}"
    stem, _, part = each.name.rpartition(".")
    maker = f", which {stem}{'.' * bool(stem)}{TAKERS[part]} makes in backward," if part in TAKERS else ""
    return f"{when}, {who}: the gradient of its output{maker} differs from the reference {far}"
