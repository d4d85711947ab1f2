"""The keys of the loss on preferences (`data=preferences`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..numbers.bounded import NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The loss of a pair of answers to a prompt, of which one is chosen and one rejected.

    With h, the chosen answer's reward less the rejected's: `dpo` is -log sigmoid(h - margin) of rewards beta log(p / p_reference)
    (arXiv:2305.18290 eq. 7); `simpo` is dpo's of rewards beta log(p) / tokens, without a reference (arXiv:2405.14734 eq. 6); `ipo` is
    (d - 1 / (2 beta))^2, where d is what the chosen answer's log(p / p_reference) / tokens exceeds the rejected's by (arXiv:2310.12036
    eq. 17, of means over tokens, as TRL has it). `label_smoothing` is the share of pairs that are labelled the wrong way round.
    `nll_weight` times the chosen answer's mean loss of a token is added (arXiv:2404.19733 eq. 1).
    """

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    margin: NotNegative = 0.0
    nll_weight: NotNegative = 0.0

    @property
    def has_reference(self) -> bool:
        """Whether rewards are measured from the log probabilities of the weights that the run begins with."""
        return self.loss != "simpo"
