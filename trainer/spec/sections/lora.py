"""The keys of low-rank adaptation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..numbers.bounded import Below1, Natural, Positive

LoraTarget = Literal[
    "query", "key", "value", "out", "gate", "up", "down",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
]  # fmt: skip
# Targets as PEFT's users write them, of latent attention by DeepSeek's names -> the last words of our weights' names
PEFT_TARGETS: dict[str, tuple[str, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("out",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "q_a_proj": ("query_down",),
    "q_b_proj": ("query",),
    "kv_a_proj_with_mqa": ("key_down", "rope_key"),
    "kv_b_proj": ("key", "value"),
}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adaptation (arXiv:2106.09685): each target W computes x W + alpha / rank x A B; only A and B are trained. Rank 0: none.
    `dropout` is of the x that A multiplies, in training.

    Without `targets` all linear layers of a layer are targets, but the router. `weights`: a folder whose A and B training begins with.
    """

    rank: Natural = 0
    alpha: Positive = 16.0
    dropout: Below1 = 0.0
    targets: tuple[LoraTarget, ...] | None = None
    weights: str | None = None

    @staticmethod
    def owns(parameter: str) -> bool:
        """Whether a parameter, by its logical name, is an A or a B."""
        return ".lora_" in parameter

    @property
    def scale(self) -> float:
        """The factor of x A B."""
        return self.alpha / self.rank if self.rank else 0.0
