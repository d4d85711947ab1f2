"""The optimizer of a run: how weights are stepped, and its schedule of learning rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from ..numbers.bounded import Below1, Count, Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon of the layers' matrices (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982), in the words of torch.optim.Muon."""

    momentum: Below1 = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Meta(ge=1, le=99)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its schedule of learning rates."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: Positive = 3e-4
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Below1 = 0.0
    muon: Muon = field(default_factory=Muon)
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    mup: Count | None = None
    ema: Below1 = 0.0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: Natural = 0
    min_lr: NotNegative = 0.0
    gradient_copy: bool = False
