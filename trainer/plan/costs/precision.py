"""Bytes an element of weights, gradients, activations and optimizer states, by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from ...spec.run import PAPERS_NAME, Run
from ...spec.sections.optimizer import Optim

MASTER_BYTES = 4  # bytes an element of the weights that an engine's optimizer steps: always float32


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes an element."""

    weight: int  # as forward computes with it
    gradient: int  # as it is accumulated
    master: int  # the float32 copy of a weight that the optimizer steps; 0: none
    activation: int


_ROWS = {
    #              weight gradient master activation
    "fp32": Widths(4,     4,       0,     4),
    "bf16": Widths(2,     2,       4,     2),
    "fp16": Widths(2,     2,       4,     2),
    "fp8":  Widths(3,     2,       4,     2),  # bf16 weights and their fp8 copy
    "fp4":  Widths(3,     2,       4,     2),
}  # fmt: skip

_GRADIENT = {"bf16": 2, "fp16": 2, "fp32": 4}

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
MOMENT_BLOCK = 256  # elements of a moment in 8 bits that share a float32 scale (arXiv:2110.02861; 256 as in bitsandbytes and torchao)
SCALE_BYTES = 4

COMPUTES: dict[str, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "fp8": ("fp8", "bf16"),  # linear layers, all else
    "fp4": ("fp4", "bf16"),
}


def widths(run: Run) -> Widths:
    """The widths of a run. In half precision 2 + 2 + (4 + 8 of Adam), as in ZeRO (arXiv:1910.02054 section 3.1). Our modules cast a weight
    to fp8 for each product, and keep no copy."""
    precision, gradients = run.train.precision, run.train.gradients
    row = _ROWS["bf16" if precision == "fp8" and run.engine != PAPERS_NAME else precision]
    if gradients == "auto":
        return row
    return Widths(row.weight, _GRADIENT[gradients], row.master, row.activation)


def moment_width(optim: Optim) -> int:
    """Bytes of an element of a moment, as it is kept between steps."""
    return MOMENT_BYTES[optim.moments]


def moment_count(optim: Optim) -> int:
    """The moments of an element that AdamW or SGD steps."""
    match optim.name:
        case "adamw" | "muon":
            return 2
        case "sgd":
            return int(has_moments(optim))
        case _:
            assert_never(optim.name)


def saved_moment_width(optim: Optim) -> int:
    """Bytes of an element of a moment in a checkpoint: one in 8 bits is widened, so that any layout can quantize it again."""
    return MASTER_BYTES if optim.moments == "int8" else moment_width(optim)


def scale_share(optim: Optim) -> float:
    """Bytes of scales for an element of all moments, where they are in 8 bits; the last block of a weight may have fewer elements."""
    return moment_count(optim) * SCALE_BYTES / MOMENT_BLOCK if optim.moments == "int8" else 0.0


def has_moments(optim: Optim) -> bool:
    """Whether an optimizer keeps moments."""
    return optim.name != "sgd" or optim.momentum > 0


def moment_bytes(optim: Optim) -> int:
    """Bytes a parameter of an optimizer's own states."""
    return moment_width(optim) * moment_count(optim)


def spared_bytes(optim: Optim) -> int:
    """Bytes a parameter that an optimizer's own states of hidden matrices lack beside those of all others: Muon keeps a momentum alone."""
    return moment_width(optim) if optim.name == "muon" else 0


def average_bytes(optim: Optim) -> int:
    """Bytes a parameter of the average of the weights (optim.ema), which is kept where the optimizer's states are."""
    return MASTER_BYTES if optim.ema else 0


def state_bytes(optim: Optim) -> int:
    """Bytes a parameter of an optimizer's own states, of its second copy of gradients and of the average of the weights, if it keeps
    these."""
    return moment_bytes(optim) + 4 * optim.gradient_copy + average_bytes(optim)
