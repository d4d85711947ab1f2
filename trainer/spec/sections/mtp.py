"""The keys of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from ..numbers.bounded import Natural, NotNegative


@dataclass(frozen=True, kw_only=True)
class Mtp:
    """Multi-token prediction (arXiv:2412.19437 section 2.2): module k of `layers` predicts the token k + 1 further on. Layers 0: none.

    The loss that is trained is the model's own plus `weight` times the mean of the modules' losses. DeepSeek-V3's weight is 0.3 for the
    first 10T tokens and 0.1 for the others (section 4.2).
    """

    layers: Natural = 0
    weight: NotNegative = 0.3

    @staticmethod
    def owns(parameter: str) -> bool:
        """Whether a parameter, by its logical name, is one of a module's own."""
        return parameter.startswith("mtp.")
