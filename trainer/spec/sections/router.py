"""The keys of a mixture's router: how tokens choose experts and weigh them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..numbers.bounded import Count, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token's logits choose its experts, and weigh their outputs; the default is Mixtral's (arXiv:2401.04088 section 2.1).

    `groups` and `top_groups` limit the choice to the experts of some groups (arXiv:2405.04434 section 2.2.2), `bias` adds to scores for
    the choice alone and changes by `bias_rate` a step (arXiv:2408.15664). `z_loss` weighs the squares of the logits' log-sum-exp in the
    gradient (arXiv:2202.08906 equation 5).
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Positive = 1.0
    groups: Count = 1
    top_groups: Count = 1
    bias: bool = False
    bias_rate: NotNegative = 0.0
    z_loss: NotNegative = 0.0

    @property
    def form(self) -> Router:
        """The keys that say what a router computes, without those of training."""
        return replace(self, bias_rate=0.0, z_loss=0.0)

    @property
    def steps_bias(self) -> bool:
        """Whether each step changes the bias."""
        return self.bias and self.bias_rate > 0

    @property
    def has_shared_scores(self) -> bool:
        """Whether weights are read from the scores of all experts, which softmax makes together; else the chosen logits are enough."""
        return self.score == "softmax" and not self.normalize
