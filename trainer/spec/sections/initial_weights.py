"""The keys of the values that weights begin with."""

from __future__ import annotations

from dataclasses import dataclass

from ..numbers.bounded import Positive


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Matrices begin as normal numbers of deviation `std`; with `scale_residual` those whose outputs are added to the residual stream have
    it divided by sqrt(2 layers) (GPT-2: Radford et al. 2019 section 2.3)."""

    std: Positive = 0.02
    scale_residual: bool = True
