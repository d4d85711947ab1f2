"""The keys of low-rank adaptation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..numbers.bounded import Below1, Natural, Positive

LoraTarget = Literal[
    "query", "key", "value", "out", "gate", "up", "down",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate",
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
    "shared_expert_gate": ("shared_gate",),
}
# The same of hybrids, where they name other layers: a layer has full attention, whose gate is a part of q_proj, or linear attention
HYBRID_TARGETS: dict[str, tuple[str, ...]] = {
    "q_proj": ("query", "query_gate"),
    "in_proj_qkvz": ("linear_query", "linear_key", "linear_value", "linear_gate"),
    "in_proj_ba": ("linear_beta", "linear_decay"),
    "out_proj": ("linear_out",),
}
LINEAR_LAYERS = frozenset(word for name, words in HYBRID_TARGETS.items() if name != "q_proj" for word in words)
OF_BOTH = ("query", "key", "value", "out")  # targets of hybrids that name layers of both attentions


def layers_of_target(target: str, family: str) -> tuple[str, ...]:
    """Return the words by which a model of a family knows the linear layers that a target names, as `Model.layer_word` has them."""
    if family == "hybrid":
        if target in OF_BOTH:
            return target, f"linear_{target}"
        if target in HYBRID_TARGETS:
            return HYBRID_TARGETS[target]
    return PEFT_TARGETS.get(target, (target,))


def target_of_layer(word: str, family: str) -> str:
    """Return the target that names a linear layer by such a word: our own word where it names no other layer, else PEFT's."""
    is_hybrid = family == "hybrid"
    plain = ("gate", "up", "down") if is_hybrid else (*OF_BOTH, "gate", "up", "down")
    names = PEFT_TARGETS | HYBRID_TARGETS if is_hybrid else PEFT_TARGETS
    return word if word in plain else next(name for name, words in names.items() if word in words)


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
